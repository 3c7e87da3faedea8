"""Sampling in bfloat16: sequences that end at different steps, seeds, and the bits of a deterministic engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.data import pass_for
from tests.engine.sampling.helpers import PROMPT, sample_request, trained_logprobs
from tests.models import KINDS
from tinsmith.engine.base import AdamParams, LoraSpec, SampleResult

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
