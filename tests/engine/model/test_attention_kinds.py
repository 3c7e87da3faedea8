"""Windows, soft caps, sinks and scaled logits on the packed path, against transformers and PEFT in eager attention.

Rows are several times longer than the window of 8 tokens, and share prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as flex

from tests.architectures import save_tiny, tiny_model
from tests.engine.conftest import engines
from tests.engine.inspection import gradients_of
from tests.engine.reference import Reference, assert_same, plain_model, write_adapter
from tests.engine.sampling.helpers import sample_request
from tinsmith.engine.base import Datum, LoraSpec, Pass, SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.cpu.calls import CompiledCalls
from tinsmith.engine.model import attention, packing
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.flex_attention import FlexAttention
from tinsmith.engine.model.logit_rule import logit_rule
from tinsmith.engine.torch_engine import TorchEngine

SLOW_KINDS = ("gemma3_text", "cohere2", "olmo3", "granite", "starcoder2", "phi")
"""Kinds whose features are those of the others, or of other tests, in another combination."""
KINDS = (
    "mistral",
    "gemma2",
    "gemma4_text",
    "phi3",
    "minicpm3",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS),
)
SAMPLED_KINDS = (
    "gpt_oss",
    "deepseek_v3",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("glm4", "mimo_v2_flash")),
)
MODULES = {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"],
    "starcoder2": ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj", "lm_head"],
    "phi": ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2", "lm_head"],
    "minicpm3": ["q_a_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
}
"""Names of the modules that adapters reach, where they are not Llama's."""
WINDOW = 8
SPEC = LoraSpec(rank=4, seed=3)
RNG = np.random.default_rng(0)
PREFIX = RNG.integers(3, 500, 29)
ROWS = [np.concatenate([PREFIX, RNG.integers(3, 500, length)]) for length in (20, 13, 1)]
ROWS += [np.concatenate([ROWS[0][:40], RNG.integers(3, 500, 9)]), RNG.integers(3, 500, 31)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in folders:
            changes = {"final_logit_softcapping": 5.0} if kind == "gemma2" else {}
            changes |= {"logits_scaling": 2.0} if kind == "granite" else {}
            # Layers with wider heads, layers that read the keys of others, embeddings for each layer.
            shared = {"global_head_dim": 32, "num_kv_shared_layers": 2}
            changes |= shared if kind == "gemma4_text" else {"num_hidden_layers": 2}
            folders[kind] = save_tiny(kind, tmp_path_factory.mktemp(kind), **changes)
        return folders[kind]

    return folder


@pytest.fixture(scope="module")
def engine_for(saved: Callable[[str], Path], wait: Any) -> Iterator[Callable[..., Any]]:
    with engines(saved, wait) as engine:
        yield engine


def request(name: str, rows: list[np.ndarray]) -> Pass:
    data = [Datum(tokens=row[:-1].astype(np.int32), targets=row[1:].astype(np.int64)) for row in rows]
    return Pass(model_id=name, data=tuple(data), loss_fn="cross_entropy")


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_give_pefts_logprobs_and_gradients(
    kind: str, saved: Any, engine_for: Any, wait: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind in MODULES:
        monkeypatch.setattr("tests.engine.reference.target_modules", lambda _: MODULES[kind])
    folder, engine = saved(kind), engine_for(kind)
    adapters = [write_adapter(folder, tmp_path / str(seed), LoraSpec(rank=4, seed=seed)) for seed in (1, 2)]
    for number, adapter in enumerate(adapters):
        wait(engine.load(f"m{number}", adapter, optimizer=False))
    passes = [request("m0", ROWS), request("m1", ROWS[:2])]
    results = wait(engine.run(passes))
    for number, adapter in enumerate(adapters):
        reference = Reference(folder, adapter)
        for actual, datum in zip(results[number].logprobs, passes[number].data, strict=True):
            # Row by row: padding within a window gives NaN in eager attention.
            loss, wanted = reference.loss(replace(passes[number], data=(datum,)))
            loss.backward()
            np.testing.assert_allclose(actual, wanted[0].detach().numpy(), atol=1e-4)
        assert_same(gradients_of(engine, f"m{number}"), reference.gradients(), 1e-3)


@pytest.mark.parametrize("recompute", ["auto", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_give_the_results_of_the_whole_tree(
    kind: str, recompute: str, saved: Any, engine_for: Any, wait: Any, tmp_path: Path
) -> None:
    """Fails if the gradients of keys and values from later pieces are dropped, or are added to other positions."""
    adapter = write_adapter(saved(kind), tmp_path / "adapter", LoraSpec(rank=4, seed=1))
    results, gradients = [], []
    for engine in (engine_for(kind), engine_for(kind, pass_tokens=16, recompute=recompute)):
        assert engine.trainer._runner.cuts
        wait(engine.load("cut", adapter, optimizer=False))
        (result,) = wait(engine.run([request("cut", ROWS)]))
        results.append(result)
        gradients.append(gradients_of(engine, "cut"))
    for whole, cut in zip(results[0].logprobs, results[1].logprobs, strict=True):
        np.testing.assert_allclose(cut, whole, atol=1e-5)
    assert results[1].metrics["loss:sum"] == pytest.approx(results[0].metrics["loss:sum"], rel=1e-5)
    assert_same(gradients[1], gradients[0], 1e-5)


def test_recomputed_layers_pass_on_the_gradients_of_shared_keys(
    saved: Any, engine_for: Any, wait: Any, tmp_path: Path
) -> None:
    """Fails if a recomputed layer takes the keys of an earlier one without their graph."""
    folder = saved("gemma4_text")
    adapter = write_adapter(folder, tmp_path / "adapter", LoraSpec(rank=4, seed=1))
    config = EngineConfig(source=str(folder), dtype="float32", device="cpu", threads=1, recompute="always")
    engines, gradients = (engine_for("gemma4_text"), TorchEngine(config)), []
    for engine in engines:
        wait(engine.load("again", adapter, optimizer=False))
        wait(engine.run([request("again", ROWS)]))
        gradients.append(gradients_of(engine, "again"))
    assert any("layers.1.self_attn.k_proj" in name for name in gradients[0])
    assert_same(*gradients, 1e-6)
    wait(engines[1].close())


@pytest.mark.parametrize("kind", [*KINDS, *SAMPLED_KINDS])
def test_greedy_sampling_continues_as_generate_does(kind: str, saved: Any, engine_for: Any, wait: Any) -> None:
    model = plain_model(saved(kind), torch.float32)
    prompts = [ROWS[0], ROWS[1], ROWS[3]]

    def sample(prompt: np.ndarray, **changes: Any) -> SampleRequest:
        return sample_request(prompt, temperature=0.0, **changes)

    # Alone, with a cached prefix, together, and with the prompt shared by three sequences.
    first = wait(engine_for(kind).sample(sample(prompts[0])))
    others = [wait(engine_for(kind).sample(sample(prompt))) for prompt in prompts]
    shared = wait(engine_for(kind).sample(sample(prompts[2], num_samples=3)))
    for prompt, result in zip([prompts[0], *prompts, prompts[2]], [first, *others, shared], strict=True):
        # Every token is the most likely one after those before it, so these are the tokens of `generate`.
        tokens = result.sequences[0].tokens
        assert len(tokens) == 16
        ids = torch.from_numpy(np.concatenate([prompt, tokens]))[None]
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for sequence in result.sequences:
            np.testing.assert_array_equal(sequence.tokens, logprobs.argmax(-1).numpy())
            np.testing.assert_allclose(sequence.logprobs, logprobs.amax(-1).numpy(), atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3", "minicpm3", "phi3", "starcoder2", "glm4", "phi", "gemma"])
def test_body_with_packed_attention_equals_eager(kind: str) -> None:
    model = tiny_model(kind)
    rows = [row % 96 for row in ROWS]
    with torch.no_grad():
        wanted = [model(input_ids=torch.from_numpy(row)[None]).logits[0] for row in rows]
        model.set_attn_implementation(attention.register())
        tree = packing.pack(
            [packing.PackedRow(key=key, adapter=0, tokens=row.astype(np.int32)) for key, row in enumerate(rows)]
        )
        context = attention.packed_attention(tree, torch.float32, torch.device("cpu"))
        hidden = model.base_model(
            input_ids=torch.as_tensor(tree.tokens)[None],
            position_ids=torch.as_tensor(tree.positions)[None],
            use_cache=False,
            context=context,
        ).last_hidden_state[0]
        rule, head = logit_rule(model), model.get_output_embeddings()
        products = hidden @ head.weight.T  # type: ignore[union-attr]
        logits = rule.apply(products if rule.bias is None else products + rule.bias)
    for key, row in enumerate(wanted):
        torch.testing.assert_close(logits[tree.index[key]], row, rtol=1e-4, atol=1e-4)


RULES = {
    "plain": AttentionRule(0.3),
    "window": AttentionRule(0.3, window=WINDOW),
    "softcap": AttentionRule(0.3, softcap=1.5),
    "sinks": AttentionRule(0.3, sinks=torch.tensor([0.3, -0.5, 1.0, 3.0])),
    "all": AttentionRule(0.3, WINDOW, 1.5, torch.tensor([0.3, -0.5, 1.0, 3.0])),
}


def by_definition(tree: packing.PackedTree, rule: AttentionRule, leaves: list[torch.Tensor]) -> torch.Tensor:
    """Attention of each packed position over its path, written out."""
    query, key, value = (leaf[0].double() for leaf in leaves)
    key, value = key.repeat_interleave(2, 0), value.repeat_interleave(2, 0)
    seen = torch.zeros(len(tree.tokens), len(tree.tokens), dtype=torch.bool)
    for path in tree.index.values():
        depth = np.arange(len(path))
        near = depth[:, None] - depth[None, :]
        allowed = (near >= 0) & (near < (rule.window or 10**6))
        seen[np.ix_(path, path)] = torch.from_numpy(allowed)
    scores = query @ key.mT * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if rule.sinks is not None:
        scores = torch.cat([scores, rule.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    return (scores.softmax(-1)[..., : len(tree.tokens)] @ value).transpose(0, 1)[None]


@pytest.mark.parametrize("form", ["kernel", "products", "compiled", "compiled bfloat16", "flex"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("value_width", [16, 8])
def test_rules_forward_and_backward(name: str, form: str, value_width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # which refuses gradients on a CPU
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    rule, draw = RULES[name], torch.Generator().manual_seed(0)
    rows = [*ROWS, RNG.integers(3, 500, 600)] if form in ("kernel", "compiled") else ROWS
    tree = packing.pack(
        [packing.PackedRow(key=key, adapter=0, tokens=row.astype(np.int32)) for key, row in enumerate(rows)]
    )
    total, dtype = len(tree.tokens), torch.bfloat16 if form in ("products", "compiled bfloat16") else torch.float32
    shapes = ((4, 16), (2, 16), (2, value_width))
    leaves = [torch.randn(1, heads, total, width, generator=draw).to(dtype).requires_grad_() for heads, width in shapes]
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    cpu = torch.device("cpu")
    compiled = form.startswith("compiled")
    packed = attention.PackedAttention(tree, dtype, cpu, compiled=compiled)
    assert compiled == isinstance(packed.calls(AttentionRule(0.3)), CompiledCalls)
    context = FlexAttention(tree, cpu) if form == "flex" else packed
    output, wanted = context.attend(0, *leaves, rule), by_definition(tree, rule, exact)  # type: ignore[misc]
    weight = torch.randn(wanted.shape, generator=draw).to(dtype)
    (output * weight).sum().backward()
    (wanted * weight).sum().backward()
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    pairs = [(output, wanted), *((leaf.grad, target.grad) for leaf, target in zip(leaves, exact, strict=True))]
    for actual, target in pairs:
        assert actual is not None
        assert target is not None
        assert (actual.double() - target.double()).norm() < bound * target.double().norm()
