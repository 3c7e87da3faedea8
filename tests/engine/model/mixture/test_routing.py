"""Routers of mixtures: float32 in every dtype, transformers' own numbers, choices recorded and replayed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.architectures import save_tiny, tiny_model
from tinsmith.engine.base import Datum, LoraSpec, ModelCard, Pass, PassResult, SampleRequest
from tinsmith.engine.build import build
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.model.mixture import routing
from tinsmith.engine.sample_validation import check_sample
from tinsmith.engine.validation import check_pass
from tinsmith.errors import BadRequest, Unsupported
from tinsmith.routed_experts import RouterShape, from_text, from_words, share_that_differs, to_text, to_words

Formula = Callable[[Any, Tensor, Tensor], Tensor]


def _softmax_of_all(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    weights = logits.softmax(-1).gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights


def _softmax_of_chosen(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.gather(1, chosen).softmax(-1)


def _sigmoid(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    weights = logits.sigmoid().gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights
    return weights * router.routed_scaling_factor


FORMULAS: dict[str, Formula] = {
    "qwen3_moe": _softmax_of_all,
    "mixtral": _softmax_of_all,
    "gpt_oss": _softmax_of_chosen,
    "glm4_moe": _sigmoid,
    "deepseek_v3": _sigmoid,
    "qwen3_5_moe_text": _softmax_of_all,
}


def _routers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


@pytest.mark.parametrize("model_type", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_routers_equal_transformers_and_replay(model_type: str, dtype: torch.dtype) -> None:
    plain, ours = (tiny_model(model_type, dtype) for _ in range(2))
    shared = routing.install(ours)
    routers = [module for module in ours.modules() if isinstance(module, routing.Router)]
    assert shared.shape == RouterShape(layers=len(routers), chosen=3, experts=8)
    wide = torch.promote_types(dtype, torch.float32)
    for layer, (router, own) in enumerate(zip(routers, _routers(plain), strict=True)):
        hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(layer)).to(dtype)
        logits, weights, chosen = router(hidden)
        expected_logits, expected, expected_choice = own.to(wide)(hidden.to(wide))
        assert logits.dtype in (wide, torch.float32)  # some are float32 in every dtype
        for actual, wanted in ((logits, expected_logits), (weights, expected), (chosen, expected_choice)):
            assert torch.equal(actual, wanted)
        other = chosen.roll(1, 0)
        leaves = [hidden.clone().requires_grad_() for _ in range(2)]
        with shared.using(
            torch.where(torch.arange(5)[:, None, None] == 4, -1, other[:, None].expand(-1, len(routers), -1))
        ):
            _, replayed_weights, replayed = router(leaves[0])
        taken = torch.where(torch.arange(5)[:, None] == 4, chosen, other)
        assert torch.equal(replayed, taken)
        wanted = FORMULAS[model_type](own, own(leaves[1].to(wide))[0], taken)
        torch.testing.assert_close(replayed_weights, wanted, rtol=1e-5, atol=1e-6, check_dtype=False)
        for value in (replayed_weights, wanted):
            (value * torch.arange(15).view(5, 3)).sum().backward()
        torch.testing.assert_close(
            leaves[0].grad, leaves[1].grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4
        )


def test_models_without_such_routers_keep_their_modules() -> None:
    for model_type in ("llama", "llama4_text"):
        model = tiny_model(model_type)
        assert routing.install(model).shape is None
        assert not [module for module in model.modules() if isinstance(module, routing.Router)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("mixture"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Any:
    engine = build(EngineConfig(source=str(folder), dtype="float32", device="cpu", threads=1))
    asyncio.run(engine.create("model", LoraSpec(rank=2, seed=0)))
    return engine


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 90, length).astype(np.int32)


def _sampled(engine: Any, *prompts: np.ndarray, record: bool = True, **options: Any) -> list[tuple[np.ndarray, Any]]:
    """Tokens without the last, and the record of each sequence."""

    async def run() -> list[Any]:
        requests = [
            SampleRequest(request_id=f"{i}", prompt=prompt, max_tokens=7, stop_tokens=(), seed=i, routed_experts=record)
            for i, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*(engine.sample(replace(request, **options)) for request in requests))

    sequences = []
    for prompt, result in zip(prompts, asyncio.run(run()), strict=True):
        for sequence in result.sequences:
            parts = (result.prompt_routed_experts, sequence.routed_experts)
            record_of_all = None if parts[0] is None else np.concatenate(parts)
            sequences.append((np.concatenate([prompt, sequence.tokens[:-1]]), record_of_all))
    return sequences


def _own_experts(plain: Any, tokens: np.ndarray) -> np.ndarray:
    """The experts [N, layers, k] that transformers' model chooses."""
    seen: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda _m, _i, output: seen.append(output[2])) for router in _routers(plain)]
    with torch.no_grad():
        plain(torch.as_tensor(tokens).long()[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).numpy()


def test_the_sampler_records_the_experts_of_every_token(engine: Any, plain: Any) -> None:
    first = _sampled(engine, _prompt(20), _prompt(11, 1), num_samples=2)
    longer = [_sampled(engine, np.concatenate([tokens, _prompt(5, 2)]))[0] for tokens, _ in first[:1]]  # from the cache
    again = _sampled(engine, _prompt(20), num_samples=2)  # the whole prompt from the cache
    for tokens, record in (*first, *longer, *again):
        assert record.dtype == np.uint8
        assert share_that_differs(record, _own_experts(plain, tokens).astype(np.uint8)) == 0
    mixed = _sampled(engine, _prompt(20), record=False)
    assert mixed[0][1] is None


def _datum(tokens: np.ndarray, record: np.ndarray | None) -> Datum:
    targets = np.roll(tokens, -1).astype(np.int64)
    words = None if record is None else to_words(record)
    return Datum(
        tokens=tokens, targets=targets, inputs={"weights": np.ones(len(tokens), np.float32)}, routed_experts=words
    )


def _trained(engine: Any, *data: Datum, **config: float) -> PassResult:
    request = Pass(model_id="model", data=data, loss_fn="cross_entropy", loss_config=config, forward_only=True)
    check_pass(request, engine.card)
    [result] = asyncio.run(engine.run([request]))
    assert isinstance(result, PassResult), result
    return result


def _forced(plain: Any, datum: Datum, record: np.ndarray) -> np.ndarray:
    """Logprobs of transformers' model whose routers take the record, with weights by formula."""

    def force(layer: int) -> Callable[..., Any]:
        def hook(router: Any, _inputs: Any, output: Any) -> Any:
            chosen = torch.as_tensor(record[:, layer].astype(np.int64))
            return output[0], _softmax_of_all(router, output[0], chosen), chosen

        return hook

    hooks = [router.register_forward_hook(force(layer)) for layer, router in enumerate(_routers(plain))]
    with torch.no_grad():
        logits = plain(torch.as_tensor(datum.tokens).long()[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return logits.log_softmax(-1).gather(1, torch.as_tensor(datum.targets)[:, None])[:, 0].numpy()


def test_the_trainer_replays_records_and_reports_what_differs(engine: Any, plain: Any) -> None:
    tokens = _prompt(24, 5)
    own = _own_experts(plain, tokens).astype(np.uint8)
    changed = own.copy()
    changed[6:12, 0] = (own[6:12, 0] + 1) % 8
    live = _trained(engine, _datum(tokens, None))
    replayed = _trained(engine, _datum(tokens, own))
    np.testing.assert_array_equal(live.logprobs[0], replayed.logprobs[0])
    assert replayed.metrics["expert_mismatch:mean"] == 0
    assert "expert_mismatch:mean" not in live.metrics
    pair = _trained(engine, _datum(tokens, own), _datum(tokens, changed))  # the same tokens share nothing after 6
    np.testing.assert_allclose(pair.logprobs[0], replayed.logprobs[0], atol=1e-5)
    np.testing.assert_allclose(pair.logprobs[1], _forced(plain, _datum(tokens, None), changed), atol=1e-4)
    assert np.abs(pair.logprobs[1] - pair.logprobs[0]).max() > 1e-2
    compared = _trained(engine, _datum(tokens, changed), router_replay=0)
    np.testing.assert_array_equal(compared.logprobs[0], live.logprobs[0])
    assert compared.metrics["expert_mismatch:mean"] == pytest.approx(6 / 48)


def test_gradients_of_a_replay_are_those_of_the_replayed_experts(engine: Any, plain: Any) -> None:
    """A gradient step along the replay's gradient changes the loss as the gradient's norm says."""
    tokens = _prompt(16, 6)
    record = (_own_experts(plain, tokens).astype(np.uint8) + 1) % 8
    datum = _datum(tokens, record)

    async def run() -> tuple[float, float]:
        await engine.create("graded", LoraSpec(rank=2, seed=3))
        model = engine.trainer._model("graded")
        model.master.detach().add_(0.02 * torch.randn(model.master.shape, generator=torch.Generator().manual_seed(0)))
        request = Pass(model_id="graded", data=(datum,), loss_fn="cross_entropy")
        await engine.run([request])
        gradient = model.gradient.clone()
        step = 1e-3 / gradient.norm()
        losses = []
        for sign in (1, -1):
            model.master.detach().add_(sign * step * gradient)
            model._weights = None
            [moved] = await engine.run([replace(request, forward_only=True)])
            losses.append(moved.metrics["loss:sum"])
            model.master.detach().sub_(sign * step * gradient)
        return (losses[0] - losses[1]) / (2 * float(step)), float(gradient.square().sum())

    change, expected = asyncio.run(run())
    assert change == pytest.approx(expected, rel=1e-3)


def test_records_are_refused_where_they_mean_nothing(engine: Any) -> None:
    tokens, shape = _prompt(6), engine.card.router
    record = np.tile(np.arange(3, dtype=np.uint8), (6, 2, 1))
    request = SampleRequest(request_id="", prompt=tokens, routed_experts=True)
    dense: ModelCard = replace(engine.card, router=None)
    for call in (lambda: check_sample(request, dense), lambda: check_pass(_pass(_datum(tokens, record)), dense)):
        with pytest.raises(Unsupported, match="not a mixture"):
            call()
    with pytest.raises(BadRequest, match="5 rows"):
        check_pass(_pass(replace(_datum(tokens, record), routed_experts=to_words(record[:5]))), engine.card)
    for values, reason in ((9, "names expert 9 of 8"), (1, "twice")):
        wrong = record.copy()
        wrong[2, 1] = values
        with pytest.raises(BadRequest, match=reason):
            check_pass(_pass(_datum(tokens, wrong)), engine.card)
    with pytest.raises(BadRequest, match="router_replay"):
        check_pass(replace(_pass(_datum(tokens, record)), loss_config={"router_replay": 2.0}), engine.card)
    np.testing.assert_array_equal(from_words(to_words(record), shape), record)
    np.testing.assert_array_equal(from_text(to_text(record)), record)


def _pass(datum: Datum) -> Pass:
    return Pass(model_id="model", data=(datum,), loss_fn="cross_entropy")
