"""Latent attention: its two forms, and caches that keep latents, against transformers and the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.architectures import save_tiny, tiny_model
from tests.engine.conftest import engines
from tests.engine.reference import plain_model
from tests.engine.sampling.helpers import assert_same_samples, sample_request, trained_logprobs
from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass, SampleResult
from tinsmith.engine.model.architectures import latents
from tinsmith.engine.model.attention_rule import AttentionRule

RANK, ROTARY = 24, 8
"""Of the tiny models: 32 values for each token and layer, in place of 4 heads of 24 + 16."""
KINDS = ("deepseek_v3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("deepseek_v2", "glm4_moe_lite", "axk1", "minicpm3")))  # fmt: skip  # noqa: E501
TOKENS = np.random.default_rng(3).integers(3, 500, 200)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = save_tiny(kind, tmp_path_factory.mktemp(kind), kv_lora_rank=RANK, num_hidden_layers=2)
        return folders[kind]

    return folder


@pytest.fixture(scope="module")
def engine_for(saved: Callable[[str], Path], wait: Any) -> Iterator[Callable[..., Any]]:
    with engines(saved, wait) as engine:
        yield engine


class WholeRow:
    """A context in which every token sees itself and those before it, written out."""

    def __init__(self, cached_queries: int) -> None:
        self.cached_queries = cached_queries

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, latents: Any = None
    ) -> Tensor:
        scores = query @ key.expand(-1, query.shape[1], -1, -1).mT * rule.scale
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return (probs @ value.expand(-1, query.shape[1], -1, -1)).transpose(1, 2)


def test_absorbed_and_expanded_forms_agree_in_float64() -> None:
    model, draw = tiny_model("deepseek_v3", torch.float64, kv_lora_rank=RANK), torch.Generator().manual_seed(0)
    module = next(module for module in model.modules() if type(module).__name__ == "DeepseekV3Attention")
    attention = latents.LatentAttention(module, "tinsmith")
    shapes = ((4, 24), (1, RANK), (1, ROTARY))
    query, latent, rotary_key = (
        torch.randn(1, heads, 11, width, dtype=torch.float64, generator=draw) for heads, width in shapes
    )
    absorbed, expanded = (
        attention.attend(WholeRow(queries), query, latent, rotary_key, AttentionRule(0.3)) for queries in (1, 0)
    )
    assert absorbed.shape == (1, 11, 4, 16)
    torch.testing.assert_close(absorbed, expanded, rtol=1e-12, atol=1e-12)


def test_other_projections_keep_keys_and_values() -> None:
    """Fails if `install` reads the weights of a projection with a bias, or of one in 4-bit blocks, as a matrix."""
    model = tiny_model("deepseek_v3", kv_lora_rank=RANK)
    assert latents.install(tiny_model("llama"), "tinsmith") == 0
    for module in model.modules():
        if "kv_b_proj" in dict(module.named_children()):
            module.kv_b_proj = nn.Linear(RANK, 4 * 32, bias=True)
    assert latents.install(model, "tinsmith") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_cache_keeps_latents_and_samples_match_transformers(kind: str, saved: Any, engine_for: Any, wait: Any) -> None:
    engine, model = engine_for(kind), plain_model(saved(kind), torch.float32)
    shape = engine.sampler.batch.kv_cache.shape
    assert (shape.heads, shape.key_width, shape.value_width, shape.latent_width) == (1, RANK + ROTARY, 0, RANK)
    assert shape.token_bytes == 4 * shape.layers * (RANK + ROTARY)
    # A new prompt, one that continues it with its latents, one that expands them, and one of which nothing is cached.
    engine.sampler.batch.prefix_cache.shrink(0)
    for start, stop in ((0, 40), (0, 60), (0, 180), (100, 130)):
        result = wait(engine.sample(sample_request(TOKENS[start:stop], max_tokens=12)))
        (sequence,) = result.sequences
        row = torch.from_numpy(np.concatenate([TOKENS[start:stop], sequence.tokens]))
        with torch.no_grad():
            logprobs = model(input_ids=row[None]).logits[0, stop - start - 1 : -1].log_softmax(-1)
        wanted = logprobs.gather(1, row[stop - start :, None])[:, 0]
        np.testing.assert_allclose(sequence.logprobs, wanted.numpy(), atol=1e-4)
    assert result.prompt_cache_hit_tokens == 0
    nodes = [node for _, node in engine.sampler.batch.prefix_cache._lru.values()]
    assert {(node.keys.shape[1:2], node.keys.shape[3], node.values.numel()) for node in nodes} == {
        ((1,), RANK + ROTARY, 0)
    }


@pytest.mark.parametrize(("queries", "form"), [(20, "absorbed"), (150, "expanded")])
def test_continued_prompt_takes_the_cheaper_form(
    queries: int, form: str, engine_for: Any, wait: Any, cache_scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 48 queries for each cached token on, as the tiny model's widths have it."""
    engine, forms = engine_for("deepseek_v3"), set[bool]()

    def observed(latents_of_pass: latents.Latents, cached: Tensor) -> tuple[Tensor, Tensor]:
        forms.add(latents_of_pass.absorbs)
        return keys_values(latents_of_pass, cached)

    keys_values = latents.Latents.keys_values
    wait(engine.sample(sample_request(TOKENS[:40], max_tokens=2, cache_scope=cache_scope)))
    monkeypatch.setattr(latents.Latents, "keys_values", observed)
    wait(engine.sample(sample_request(TOKENS[: 40 + queries], max_tokens=1, cache_scope=cache_scope)))
    assert forms == {form == "absorbed"}


def adapted(engine: Any, wait: Any, model_id: str, seed: int) -> None:
    """A model with an adapter that was trained for two steps, captured as a version of its name."""
    wait(engine.create(model_id, LoraSpec(rank=4, seed=seed)))
    row = np.roll(TOKENS, seed)
    datum = Datum(tokens=row[:60].astype(np.int32), targets=row[1:61].astype(np.int64))
    for _ in range(2):
        wait(engine.run([Pass(model_id=model_id, data=(datum,), loss_fn="cross_entropy")]))
        wait(engine.step(model_id, AdamParams(learning_rate=0.02, eps=1e-8)))
    wait(engine.capture(model_id, model_id))


def test_sampler_agrees_with_trainer_for_two_tenants(engine_for: Any, wait: Any, model_id: str) -> None:
    """Decoding and a continued prefix attend to latents; the trainer expands them."""
    engine, names = engine_for("deepseek_v3"), [f"{model_id}-{number}" for number in (1, 2)]
    for seed, name in enumerate(names, 1):
        adapted(engine, wait, name, seed)

    async def together(length: int) -> list[SampleResult]:
        requests = [sample_request(TOKENS[:length], version=name, max_tokens=20, num_samples=2) for name in names]
        return await asyncio.gather(*(engine.sample(request) for request in requests))

    for length in (50, 80):
        results = wait(together(length))
        for name, result in zip(names, results, strict=True):
            assert result.prompt_cache_hit_tokens == (0 if length == 50 else 50)
            for sequence in result.sequences:
                trained = trained_logprobs(engine, wait, name, TOKENS[:length], sequence.tokens)
                np.testing.assert_allclose(sequence.logprobs, trained, atol=2e-5)


def test_group_reads_latents_of_its_prompt(
    engine_for: Any, wait: Any, cache_scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, settings = engine_for("deepseek_v3"), {"max_tokens": 70, "num_samples": 4}  # rows move to larger ones
    expected = wait(engine.sample(sample_request(TOKENS[:90], cache_scope=cache_scope, **settings)))
    monkeypatch.setattr("tinsmith.engine.sampling.capacity.MIN_SHARED_TOKENS", 64)
    observed = list[int]()
    cache = engine.sampler.batch.kv_cache
    request = sample_request(TOKENS[:90], cache_scope=f"{cache_scope}-2", **settings)
    result = wait(engine.sample(request, lambda _: observed.append(cache.tokens)))
    assert_same_samples(result, expected)
    assert observed[-1] <= 96 + 4 * 160


def test_bfloat16_keeps_sampler_and_trainer_equal(engine_for: Any, wait: Any, model_id: str) -> None:
    """There caches keep keys and values. Fails without that condition of `install`: experts flip (0.02 on average)."""
    engine = engine_for("deepseek_v3", dtype="bfloat16")
    assert engine.sampler.batch.kv_cache.shape.latent_width == 0
    wait(engine.create(model_id, LoraSpec(rank=2, seed=0)))
    gaps = []
    for start in (0, 50, 100):
        prompt = TOKENS[start : start + 50]
        for sequence in wait(engine.sample(sample_request(prompt, max_tokens=50, num_samples=2))).sequences:
            trained = trained_logprobs(engine, wait, model_id, prompt, sequence.tokens)
            gaps.append(np.abs(sequence.logprobs - trained))
    assert np.mean(gaps) < 1e-4
