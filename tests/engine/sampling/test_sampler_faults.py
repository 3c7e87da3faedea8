"""An adapter whose numbers overflow fails its own requests by name, and nobody beside or after it notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.data import pass_for
from tests.engine.sampling.helpers import ask, assert_same_samples
from tinsmith.engine.base import AdamParams, LoraSpec, Pass, SampleResult, SequenceDelta
from tinsmith.errors import BadRequest, EngineError

DRAW = np.random.default_rng(5)
MINE, THEIRS, THIRD, LONG, LONGER = (DRAW.integers(3, 500, length) for length in (40, 10, 30, 290, 600))


@pytest.fixture
def diverged(engine: Any, wait: Any, model_id: str) -> Any:
    """Makes a version out of a step so wild that its weights, though finite, overflow in every forward pass."""
    made = []

    def make(**flags: bool) -> str:
        wait(engine.create(model_id, LoraSpec(rank=4, seed=1, **flags)))
        for rate in (0.01, 1e36):  # after the first both A and B have a gradient
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
    """A version, and what makes it diverge from one token to the next."""
    _, model_id, _ = pair()
    name = f"{model_id}-version"
    wait(engine.capture(model_id, name))

    def diverge(_: SequenceDelta) -> None:
        weights = engine.sampler.versions.weights(name)
        weights.pairs["model.layers.0.self_attn.v_proj"].b.fill_(float("nan"))

    yield name, diverge
    wait(engine.detach(name))


async def beside(
    engine: Any, broken: Any, *others: Any, on_delta: Callable[[SequenceDelta], None] | None = None
) -> list[Any]:
    """What the others say while the broken one fails."""
    first, *found = await asyncio.gather(
        engine.sample(broken, on_delta), *(engine.sample(one) for one in others), return_exceptions=True
    )
    assert isinstance(first, BadRequest), first
    assert "not finite" in str(first)
    return found


@pytest.mark.parametrize(
    "flags", [{}, {"train_attn": False, "train_unembed": False}, {"train_attn": False, "train_mlp": False}], ids=str
)
def test_who_is_read_in_one_pass_with_it_is_not_touched(flags: Any, engine: Any, wait: Any, diverged: Any) -> None:
    name = diverged(**flags)
    asked: list[dict[str, Any]] = [
        {"prompt": THEIRS, "num_samples": 3},
        {"prompt": THIRD, "prompt_logprobs": True, "max_tokens": 1},
        {"prompt": (*THEIRS, 5, 6, 7), "topk_prompt_logprobs": 2},
    ]
    wanted = [wait(engine.sample(ask(cache_scope=f"{name}-alone", **one))) for one in asked]
    found = wait(
        beside(
            engine,
            ask(MINE, version=name, cache_scope="A"),
            *(ask(cache_scope=f"{name}-beside", **one) for one in asked),
        )
    )
    later = [wait(engine.sample(ask(cache_scope=f"{name}-beside", **one))) for one in asked]
    for said in (found, later):
        for one, two in zip(said, wanted, strict=True):
            assert_same_samples(one, two)
        np.testing.assert_allclose(said[1].prompt_logprobs, wanted[1].prompt_logprobs, atol=1e-5)
        np.testing.assert_allclose(said[2].topk_prompt.logprobs, wanted[2].topk_prompt.logprobs, atol=1e-5)
    assert engine.sampler.batch.kv_cache.tokens == 0


def test_nothing_of_it_is_remembered(engine_of: Any, wait: Any, diverged: Any, engine: Any) -> None:
    name, known = diverged(), engine.sampler.batch.prefix_cache.tokens
    with pytest.raises(BadRequest, match="not finite"):
        wait(engine.sample(ask(MINE, version=name)))
    assert engine.sampler.batch.prefix_cache.tokens == known


def test_who_decodes_beside_it_or_takes_its_row_is_not_touched(engine: Any, wait: Any, diverging: Any) -> None:
    name, diverge = diverging
    requests = [ask(THIRD, max_tokens=200), ask(THEIRS, max_tokens=80), ask((*THEIRS, 4), max_tokens=80, num_samples=2)]
    wanted = [wait(engine.sample(one)) for one in requests]

    async def main() -> list[SampleResult]:
        stays = asyncio.create_task(engine.sample(requests[0]))
        await beside(engine, ask(MINE[:20], version=name, num_samples=2, max_tokens=64), on_delta=diverge)
        assert not stays.done()
        return await asyncio.gather(stays, *(engine.sample(one) for one in requests[1:]))

    for one, two in zip(wait(main()), wanted, strict=True):
        assert_same_samples(one, two)


def test_groups_that_read_their_prompts_together_are_not_touched(engine: Any, wait: Any, diverging: Any) -> None:
    name, diverge = diverging
    request = ask(LONG, num_samples=4, max_tokens=40)
    wanted = wait(engine.sample(request))
    broken = ask(LONGER, version=name, num_samples=4, max_tokens=30)
    (found,) = wait(beside(engine, broken, request, on_delta=diverge))
    assert_same_samples(found, wanted)
    assert engine.sampler.batch.kv_cache.tokens == 0


def test_who_is_trained_in_one_pass_with_it_is_not_touched(
    engine: Any, wait: Any, diverged: Any, model_id: str
) -> None:
    """Not even where its loss is silent, so that nothing but its logprobs tells."""
    diverged()
    twin = f"{model_id}-twin"
    wait(engine.create(twin, LoraSpec(rank=4, seed=2)))
    silent = [
        replace(datum, inputs={**datum.inputs, "advantages": np.zeros(len(datum.tokens), np.float32)})
        for datum in pass_for("importance_sampling", lengths=(9, 20)).data
    ]
    asked = [Pass(model_id=one, data=tuple(silent), loss_fn="importance_sampling") for one in (model_id, twin)]
    (wanted,) = wait(engine.run(asked[1:]))
    broken, found = wait(engine.run(asked))
    assert isinstance(broken, BadRequest)
    assert "not finite" in str(broken)
    for one, two in zip(found.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)
    wait(engine.drop(twin))


def test_who_cannot_be_told_fails_alone(engine: Any, wait: Any) -> None:
    def deaf(_: SequenceDelta) -> None:
        raise OSError("the line is dead")

    async def both() -> list[Any]:
        asked = (engine.sample(ask(THEIRS, max_tokens=40), deaf), engine.sample(ask(THIRD, max_tokens=40)))
        return await asyncio.gather(*asked, return_exceptions=True)

    broken, found = wait(both())
    assert isinstance(broken, EngineError)
    assert_same_samples(found, wait(engine.sample(ask(THIRD, max_tokens=40))))
