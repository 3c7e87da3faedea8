"""An engine on tiny mixtures of experts, against transformers' eager model with the adapter merged into its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.architectures import save_tiny
from tests.engine.lora.merged import merged_weights
from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass, SampleRequest
from tinsmith.engine.build import build
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.lora.adapter import LoraPair
from tinsmith.engine.model.support import is_expert_stack

ADAM = AdamParams(learning_rate=2e-3, eps=1e-4)


KINDS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "deepseek_v3")},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32,
                    "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32},
    "ernie4_5_moe": {}, "afmoe": {}, "mimo_v2_flash": {},
}  # fmt: skip
SLOW_KINDS = ("ernie4_5_moe", "afmoe", "mimo_v2_flash")


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=pytest.mark.slow if kind in SLOW_KINDS else ()) for kind in KINDS],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"num_hidden_layers": 2, "sliding_window": None, **KINDS[request.param]}
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param), **changes)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Any:
    return build(EngineConfig(source=str(folder), dtype="float32", device="cpu", threads=1))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def _data() -> tuple[Datum, ...]:
    """Three rows, two with a common prefix."""
    draw = np.random.default_rng(0)
    first, other = (draw.integers(3, 90, 31, dtype=np.int32) for _ in range(2))
    rows = [first, np.concatenate([first[:17], other[:9]]), other]
    weights = [draw.normal(size=len(row) - 1).astype(np.float32) for row in rows]
    return tuple(
        Datum(tokens=row[:-1], targets=row[1:].astype(np.int64), inputs={"weights": weight})
        for row, weight in zip(rows, weights, strict=True)
    )


def _logprobs(plain: Any, pairs: Mapping[str, LoraPair], scale: float) -> list[Tensor]:
    """The logprobs of the data's targets under the adapter."""
    changed = merged_weights(dict(plain.named_parameters()), pairs, scale)
    results = []
    for datum in _data():
        inputs = {"input_ids": torch.as_tensor(datum.tokens).long()[None]}
        logits = torch.func.functional_call(plain, changed, (), inputs).logits[0]
        results.append(logits.log_softmax(-1).gather(1, torch.as_tensor(datum.targets)[:, None])[:, 0])
    return results


def test_training_equals_merged_weights(engine: Any, plain: Any) -> None:
    asyncio.run(_train_against(engine, plain))


async def _train_against(engine: Any, plain: Any) -> None:
    """Two models of different ranks share each pass; two steps, so that B is not 0 and every matrix has gradients."""
    specs = {"four": LoraSpec(rank=4, seed=1), "nine": LoraSpec(rank=9, seed=2)}
    leaves, optimizers, scales = {}, {}, {}
    for name, spec in specs.items():
        await engine.create(name, spec)
        model = engine.trainer._model(name)
        pairs = model.layout.pairs(model.master.detach().clone())
        leaves[name] = {
            key: LoraPair(*(tensor.clone().requires_grad_() for tensor in (pair.a, pair.b)))
            for key, pair in pairs.items()
        }
        flat = [tensor for pair in leaves[name].values() for tensor in (pair.a, pair.b)]
        optimizers[name] = torch.optim.AdamW(flat, lr=2e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
        scales[name] = model.layout.scale
    for _ in range(2):
        passes = [Pass(model_id=name, data=_data(), loss_fn="cross_entropy") for name in specs]
        results = dict(zip(specs, await engine.run(passes), strict=True))
        for name in specs:
            expected = _logprobs(plain, leaves[name], scales[name])
            terms = [p @ torch.as_tensor(datum.inputs["weights"]) for p, datum in zip(expected, _data(), strict=True)]
            loss = -torch.stack(terms).sum()
            optimizers[name].zero_grad()
            loss.backward()
            for ours, theirs in zip(results[name].logprobs, expected, strict=True):
                np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=2e-4)
            for key, (a_grad, b_grad) in engine.trainer.gradients(name).items():
                for ours, leaf in ((a_grad, leaves[name][key].a), (b_grad, leaves[name][key].b)):
                    np.testing.assert_allclose(ours, leaf.grad.numpy(), rtol=1e-3, atol=1e-3, err_msg=key)
            optimizers[name].step()
            await engine.step(name, ADAM)


def test_saved_adapters_are_read_back(engine: Any, tmp_path: Path) -> None:
    async def run() -> tuple[np.ndarray, np.ndarray]:
        await engine.create("saved", LoraSpec(rank=3, seed=5))
        await engine.run([Pass(model_id="saved", data=_data(), loss_fn="cross_entropy")])
        await engine.step("saved", ADAM)
        await engine.save("saved", tmp_path / "adapter", optimizer=True)
        await engine.load("read", tmp_path / "adapter", optimizer=True)
        return tuple(engine.trainer._model(name).master.detach().numpy() for name in ("saved", "read"))  # type: ignore[return-value]

    saved, read = asyncio.run(run())
    np.testing.assert_array_equal(saved, read)


def test_greedy_sampling_equals_generate(engine: Any, plain: Any) -> None:
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (1, 14, 30)]
    for prompt, sampled in zip(prompts, _sample(engine, prompts), strict=True):
        expected = plain.generate(
            torch.as_tensor(prompt).long()[None], max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        np.testing.assert_array_equal(sampled.tokens, expected[0, len(prompt) :].numpy())


def test_training_routes_as_sampling_does(engine: Any, record_routes: Callable[[], list[Tensor]]) -> None:
    """Expert ids of 200 tokens sampled one by one, against those of one pass over them."""
    prompt = np.arange(60, 66, dtype=np.int32)  # of no other test: nothing of it is cached
    layers = sum(map(is_expert_stack, engine.trainer._base.model.modules()))
    first = record_routes()
    [sampled] = _sample(engine, [prompt], 200)
    per_layer = [torch.cat(first[layer::layers]).sort().values for layer in range(layers)]
    tokens = np.concatenate([prompt, sampled.tokens])
    second = record_routes()
    datum = Datum(
        tokens=tokens[:-1],
        targets=tokens[1:].astype(np.int64),
        inputs={"weights": np.ones(len(tokens) - 1, np.float32)},
    )

    async def score() -> Any:
        await engine.create("routed", LoraSpec(rank=4, seed=3))
        [result] = await engine.run(
            [Pass(model_id="routed", data=(datum,), loss_fn="cross_entropy", forward_only=True)]
        )
        return result

    result = asyncio.run(score())
    for layer in range(layers):
        assert torch.equal(per_layer[layer], second[layer].sort().values)
    np.testing.assert_allclose(result.logprobs[0][len(prompt) - 1 :], sampled.logprobs, atol=1e-4)


@pytest.fixture
def record_routes(engine: Any) -> Any:
    """Starts a new list of the expert ids of each call of each layer's experts."""
    lists: list[list[Tensor]] = [[]]

    def hook(_module: Any, inputs: Any) -> None:
        lists[-1].append(inputs[1].clone())

    modules = [m for n, m in engine.trainer._base.model.named_modules() if n.endswith(".experts")]
    handles = [module.register_forward_pre_hook(hook) for module in modules]

    def start() -> list[Tensor]:
        lists.append([])
        return lists[-1]

    yield start
    for handle in handles:
        handle.remove()


def _sample(engine: Any, prompts: list[np.ndarray], count: int = 24) -> list[Any]:
    async def run() -> list[Any]:
        requests = [
            SampleRequest(request_id=str(key), prompt=prompt, max_tokens=count, temperature=0, stop_tokens=())
            for key, prompt in enumerate(prompts)
        ]
        return [result.sequences[0] for result in await asyncio.gather(*map(engine.sample, requests))]

    return asyncio.run(run())
