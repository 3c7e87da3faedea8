"""Faults: an adapter that overflows, or an on_delta that raises, fails only its own requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.data import pass_for
from tests.engine.sampling.helpers import assert_same_samples, sample_request
from tinsmith.engine.base import AdamParams, LoraSpec, Pass, SampleResult, SequenceDelta
from tinsmith.errors import BadRequest, EngineError

DRAW = np.random.default_rng(5)
PROMPT_A, PROMPT_B, PROMPT_C, LONG, LONGER = (DRAW.integers(3, 500, length) for length in (40, 10, 30, 290, 600))


@pytest.fixture
def diverged(engine: Any, wait: Any, model_id: str) -> Any:
    """Creates a version whose weights are finite, but so large that every forward pass overflows."""
    made = []

    def make(**flags: bool) -> str:
        wait(engine.create(model_id, LoraSpec(rank=4, seed=1, **flags)))
        for rate in (0.01, 1e36):  # after the first step both A and B have a gradient
            wait(engine.run([pass_for("cross_entropy", model_id)]))
            wait(engine.step(model_id, AdamParams(learning_rate=rate, eps=1e-8)))
        made.append(f"{model_id}-version")
        wait(engine.capture(model_id, made[-1]))
        return made[-1]

    yield make
    wait(engine.drop(model_id))
    for name in made:
        wait(engine.detach(name))


@pytest.fixture
def diverging(engine: Any, pair: Any, wait: Any) -> Any:
    """A version, and a function that sets its weights to NaN between two tokens."""
    _, model_id, _ = pair()
    name = f"{model_id}-version"
    wait(engine.capture(model_id, name))

    def diverge(_: SequenceDelta) -> None:
        weights = engine.sampler.versions.weights(name)
        laid_out = [tensor for panels in weights.panels.values() for tensor in panels.tensors]
        for tensor in (weights.pairs["model.layers.0.self_attn.v_proj"].b, *laid_out):
            tensor.fill_(float("nan"))

    yield name, diverge
    wait(engine.detach(name))


async def sample_with_fault(
    engine: Any, broken: Any, *others: Any, on_delta: Callable[[SequenceDelta], None] | None = None
) -> list[Any]:
    """Results of the other requests while the broken one fails."""
    error, *results = await asyncio.gather(
        engine.sample(broken, on_delta), *(engine.sample(request) for request in others), return_exceptions=True
    )
    assert isinstance(error, BadRequest), error
    assert "not finite" in str(error)
    return results


@pytest.mark.parametrize(
    "flags", [{}, {"train_attn": False, "train_unembed": False}, {"train_attn": False, "train_mlp": False}], ids=str
)
def test_nan_in_prefill_fails_its_own_request_only(flags: Any, engine: Any, wait: Any, diverged: Any) -> None:
    name = diverged(**flags)
    settings: list[dict[str, Any]] = [
        {"prompt": PROMPT_B, "num_samples": 3},
        {"prompt": PROMPT_C, "prompt_logprobs": True, "max_tokens": 1},
        {"prompt": (*PROMPT_B, 5, 6, 7), "topk_prompt_logprobs": 2},
    ]
    expected = [wait(engine.sample(sample_request(cache_scope=f"{name}-alone", **left))) for left in settings]
    actual = wait(
        sample_with_fault(
            engine,
            sample_request(PROMPT_A, version=name, cache_scope="A"),
            *(sample_request(cache_scope=f"{name}-beside", **left) for left in settings),
        )
    )
    later = [wait(engine.sample(sample_request(cache_scope=f"{name}-beside", **left))) for left in settings]
    for sampled in (actual, later):
        for left, right in zip(sampled, expected, strict=True):
            assert_same_samples(left, right)
        np.testing.assert_allclose(sampled[1].prompt_logprobs, expected[1].prompt_logprobs, atol=1e-5)
        np.testing.assert_allclose(sampled[2].topk_prompt.logprobs, expected[2].topk_prompt.logprobs, atol=1e-5)
    assert engine.sampler.batch.kv_cache.tokens == 0


def test_failed_request_is_not_cached(engine_of: Any, wait: Any, diverged: Any, engine: Any) -> None:
    name, cached = diverged(), engine.sampler.batch.prefix_cache.tokens
    with pytest.raises(BadRequest, match="not finite"):
        wait(engine.sample(sample_request(PROMPT_A, version=name)))
    assert engine.sampler.batch.prefix_cache.tokens == cached


def test_nan_in_decode_fails_its_own_request_only(engine: Any, wait: Any, diverging: Any) -> None:
    name, diverge = diverging
    requests = [
        sample_request(PROMPT_C, max_tokens=200),
        sample_request(PROMPT_B, max_tokens=80),
        sample_request((*PROMPT_B, 4), max_tokens=80, num_samples=2),
    ]
    expected = [wait(engine.sample(left)) for left in requests]

    async def main() -> list[SampleResult]:
        stays = asyncio.create_task(engine.sample(requests[0]))
        await sample_with_fault(
            engine, sample_request(PROMPT_A[:20], version=name, num_samples=2, max_tokens=64), on_delta=diverge
        )
        assert not stays.done()
        return await asyncio.gather(stays, *(engine.sample(left) for left in requests[1:]))

    for left, right in zip(wait(main()), expected, strict=True):
        assert_same_samples(left, right)


def test_nan_does_not_reach_groups_with_shared_prompts(engine: Any, wait: Any, diverging: Any) -> None:
    name, diverge = diverging
    request = sample_request(LONG, num_samples=4, max_tokens=40)
    expected = wait(engine.sample(request))
    broken = sample_request(LONGER, version=name, num_samples=4, max_tokens=30)
    (actual,) = wait(sample_with_fault(engine, broken, request, on_delta=diverge))
    assert_same_samples(actual, expected)
    assert engine.sampler.batch.kv_cache.tokens == 0


def test_nan_in_training_fails_its_own_pass_only(engine: Any, wait: Any, diverged: Any, model_id: str) -> None:
    """Also where the loss has zero gradient, so that only the logprobs show the fault."""
    diverged()
    twin = f"{model_id}-twin"
    wait(engine.create(twin, LoraSpec(rank=4, seed=2)))
    zero_advantage = [
        replace(datum, inputs={**datum.inputs, "advantages": np.zeros(len(datum.tokens), np.float32)})
        for datum in pass_for("importance_sampling", lengths=(9, 20)).data
    ]
    passes = [
        Pass(model_id=left, data=tuple(zero_advantage), loss_fn="importance_sampling") for left in (model_id, twin)
    ]
    (expected,) = wait(engine.run(passes[1:]))
    broken, actual = wait(engine.run(passes))
    assert isinstance(broken, BadRequest)
    assert "not finite" in str(broken)
    for left, right in zip(actual.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)
    wait(engine.drop(twin))


def test_raising_on_delta_fails_its_own_request_only(engine: Any, wait: Any) -> None:
    def raise_error(_: SequenceDelta) -> None:
        raise OSError("the line is dead")

    async def run_both() -> list[Any]:
        calls = (
            engine.sample(sample_request(PROMPT_B, max_tokens=40), raise_error),
            engine.sample(sample_request(PROMPT_C, max_tokens=40)),
        )
        return await asyncio.gather(*calls, return_exceptions=True)

    broken, result = wait(run_both())
    assert isinstance(broken, EngineError)
    assert_same_samples(result, wait(engine.sample(sample_request(PROMPT_C, max_tokens=40))))
