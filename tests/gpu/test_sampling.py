"""Sampling in bfloat16: sequences that end at different steps, seeds, and the bits of a deterministic engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.data import pass_for
from tests.engine.sampling.helpers import PROMPT, assert_same_samples, sample_request, trained_logprobs
from tests.models import KINDS
from tinsmith.engine.base import AdamParams, LoraSpec, SampleResult
from tinsmith.engine.sampling import sampler
from tinsmith.engine.sampling.paged import adapter_slots
from tinsmith.engine.sampling.paged.pages import PagedCache

pytestmark = pytest.mark.gpu

LENGTHS = (1, 3, 17, 64, 65, 130, 200)


async def trained(engine: Any, version: str) -> None:
    await engine.create(version, LoraSpec(rank=4, seed=1))
    (result,) = await engine.run([pass_for("cross_entropy", version)])
    assert not isinstance(result, Exception)
    await engine.step(version, AdamParams(learning_rate=1e-2))
    await engine.capture(version, version)


async def unequal(engine: Any, version: str) -> list[SampleResult]:
    """Requests of different lengths, in one batch."""
    requests = [sample_request(version=version, max_tokens=length, num_samples=2, seed=length) for length in LENGTHS]
    return list(await asyncio.gather(*(engine.sample(request) for request in requests)))


@pytest.mark.parametrize(
    "rule", [{}, {"top_k": 40, "top_p": 0.9, "topk_sample_logprobs": 3}], ids=["plain", "restricted"]
)
def test_graphs_over_pages_give_the_tokens_of_banks(
    engine_of: Callable[..., Any],
    device: str,
    wait: Any,
    model_id: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rule: dict[str, Any],
) -> None:
    requests = [sample_request(max_tokens=length, num_samples=2, seed=length, **rule) for length in LENGTHS]
    results = []
    for has_pages in (True, False):
        if not has_pages:
            monkeypatch.setattr(sampler, "page_attention", lambda _: None)
        engine = engine_of("llama", device=device, dtype="float32", cache_tokens=20_000 + has_pages)
        assert isinstance(engine.sampler.batch.kv_cache, PagedCache) == (has_pages and device == "cuda")
        wait(trained(engine, model_id))
        for _ in range(2):  # the second time all steps are graphs
            results.append([wait(engine.sample(replace(request, version=model_id))) for request in requests])
        wait(engine.drop(model_id))
        wait(engine.detach(model_id))
    assert "cannot be a CUDA graph" not in caplog.text
    for other in results[1:]:
        for left, right in zip(results[0], other, strict=True):
            assert_same_samples(left, right, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_unequal_ends_match_trainer(
    kind: str, engine_of: Callable[..., Any], device: str, wait: Any, model_id: str
) -> None:
    engine = engine_of(kind, device=device, dtype="bfloat16")
    wait(trained(engine, model_id))
    for length, result in zip(LENGTHS, wait(unequal(engine, model_id)), strict=True):
        for sequence in result.sequences:
            assert len(sequence.tokens) == length
            expected = trained_logprobs(engine, wait, model_id, PROMPT, sequence.tokens)
            assert np.abs(sequence.logprobs - expected).mean() < 0.1
    wait(engine.detach(model_id))


def test_seed_gives_its_tokens_in_any_company(
    engine_of: Callable[..., Any], device: str, wait: Any, model_id: str
) -> None:
    engine = engine_of("llama", device=device, dtype="float32")
    wait(trained(engine, model_id))
    together = wait(unequal(engine, model_id))
    alone = wait(engine.sample(sample_request(version=model_id, max_tokens=LENGTHS[3], num_samples=2, seed=LENGTHS[3])))
    for left, right in zip(together[3].sequences, alone.sequences, strict=True):
        np.testing.assert_array_equal(left.tokens, right.tokens)
    wait(engine.detach(model_id))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_deterministic_engine_repeats_bits(
    kind: str, engine_of: Callable[..., Any], device: str, wait: Any, model_id: str
) -> None:
    engine = engine_of(kind, device=device, dtype="bfloat16", deterministic=True)
    bits = []
    for number in range(2):
        name = f"{model_id}-{number}"
        wait(trained(engine, name))
        (result,) = wait(engine.run([pass_for("ppo", name)]))
        sampled = wait(unequal(engine, name))
        bits.append(
            [
                *(logprobs.tobytes() for logprobs in result.logprobs),
                *(sequence.tokens.tobytes() for each in sampled for sequence in each.sequences),
                *(sequence.logprobs.tobytes() for each in sampled for sequence in each.sequences),
            ]
        )
        wait(engine.detach(name))
        wait(engine.drop(name))
    assert bits[0] == bits[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_in_slots_have_a_kernel(device: str, dtype: torch.dtype) -> None:
    products = adapter_slots.products_on(torch.device(device), dtype)
    assert (products is adapter_slots.add_by_operators) == (device == "cpu")
