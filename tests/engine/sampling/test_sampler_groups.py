"""Many answers to one prompt: it stands in memory once, and nobody notices."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.engine.data import pass_for
from tests.engine.sampling.helpers import ask, assert_same_samples
from tests.models import KINDS
from tinsmith.engine.base import AdamParams, SampleResult
from tinsmith.errors import EngineError, Gone

PROMPT = tuple(int(token) for token in np.random.default_rng(7).integers(3, 500, 900))
GROUP = 6


@pytest.fixture
def space(model_id: str) -> str:
    """A space that no other test uses."""
    return f"space-of-{model_id}"


def alone(engine: Any, wait: Any, prompt: Any = PROMPT, **settings: Any) -> SampleResult:
    """The group's first two answers, which are too few to share."""
    return wait(engine.sample(ask(prompt, num_samples=2, **settings)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_says_what_each_would_say_alone(kind: str, engine_of: Any, wait: Any, space: str):
    engine, fresh = engine_of(kind), engine_of(kind, cache_tokens=1)
    found = wait(engine.sample(ask(num_samples=GROUP, prompt=PROMPT, max_tokens=100, cache_scope=space)))
    few = alone(fresh, wait, max_tokens=100)
    assert_same_samples(SampleResult(sequences=found.sequences[:2]), few)
    assert len({tuple(one.tokens.tolist()) for one in found.sequences}) == GROUP


def test_a_group_s_rows_hold_what_is_their_own(engine: Any, wait: Any, space: str):
    sampler, looks = engine.sampler, list[int]()
    request = ask(PROMPT, num_samples=8, max_tokens=30, cache_scope=space)
    wait(engine.sample(request, lambda _: looks.append(sampler.batch.kv_cache.tokens)))
    assert looks[-1] == 1024 + 8 * 64
    assert sampler.batch.kv_cache.tokens == 0


def test_a_group_counts_for_what_it_takes(engine_of: Any, wait: Any, space: str):
    """Two groups run at once where not one would have room for a prompt in each of its rows."""
    engine = engine_of("llama", cache_tokens=3100)
    looks: list[int] = []

    async def both() -> None:
        requests = [ask((seed, *PROMPT), num_samples=8, max_tokens=30, cache_scope=space) for seed in (5, 6)]
        await asyncio.gather(
            *(engine.sample(one, lambda _: looks.append(len(engine.sampler.batch.sequences))) for one in requests)
        )

    wait(both())
    assert max(looks) == 16


def test_requests_with_one_prompt_and_others_in_one_batch(engine: Any, engine_of: Any, wait: Any, space: str):
    """Single requests share too; some prompts go on from a shared one, some are alone, one is asked about."""
    fresh = engine_of("llama", cache_tokens=1)
    prompts = [PROMPT] * 5 + [PROMPT[:880]] * 4 + [(*PROMPT, 5, 6), (8, 9), PROMPT[:100]]

    async def together(one: Any) -> list[SampleResult]:
        asked = [
            ask(prompt, seed=seed, max_tokens=2 * seed - 30, prompt_logprobs=seed == 22, cache_scope=space)
            for seed, prompt in enumerate(prompts, 20)
        ]
        return await asyncio.gather(*(one.sample(request) for request in asked))

    for _ in range(2):
        found = wait(together(engine))
        for seed, (one, prompt) in enumerate(zip(found, prompts, strict=True), 20):
            assert_same_samples(one, wait(fresh.sample(ask(prompt, seed=seed, max_tokens=2 * seed - 30))))


def test_each_of_a_group_goes_on_from_what_it_said(engine: Any, engine_of: Any, wait: Any, space: str):
    fresh = engine_of("llama", cache_tokens=1)
    first = wait(engine.sample(ask(PROMPT, num_samples=GROUP, max_tokens=30, cache_scope=space)))
    for sequence in first.sequences:
        prompt = (*PROMPT, *sequence.tokens.tolist(), 4, 5)
        second = wait(engine.sample(ask(prompt, num_samples=4, max_tokens=30, cache_scope=space)))
        assert second.prompt_cache_hit_tokens == len(PROMPT) + 29
        assert_same_samples(SampleResult(sequences=second.sequences[:2]), alone(fresh, wait, prompt, max_tokens=30))


def test_a_group_goes_on_when_its_prompt_is_forgotten(engine_of: Any, wait: Any, space: str):
    small, large = engine_of("llama", cache_tokens=1800), engine_of("llama")

    async def crowded() -> SampleResult:
        running = asyncio.create_task(small.sample(ask(PROMPT, num_samples=4, max_tokens=150, cache_scope=space)))
        await asyncio.sleep(0.05)
        for seed in range(6):
            await small.sample(ask((seed + 20, *PROMPT[:750]), max_tokens=20, cache_scope=space))
        return await running

    assert_same_samples(wait(crowded()), wait(large.sample(ask(PROMPT, num_samples=4, max_tokens=150))))
    assert small.sampler.batch.kv_cache.tokens == 0
    assert small.sampler.batch.prefix_cache.tokens <= 1800


def test_a_version_may_go_while_its_group_runs(engine: Any, pair: Any, wait: Any, space: str):
    _, model_id, _ = pair()
    name, before = f"{model_id}-v", engine.sampler.batch.prefix_cache.tokens
    wait(engine.capture(model_id, name))
    wait(engine.capture(model_id, f"{name}-2"))

    async def replaced() -> tuple[SampleResult, SampleResult]:
        settings = {"num_samples": 4, "max_tokens": 120}
        wanted = await engine.sample(ask(PROMPT, version=f"{name}-2", **settings))
        await engine.detach(f"{name}-2")
        running = asyncio.create_task(engine.sample(ask(PROMPT, version=name, cache_scope=space, **settings)))
        await asyncio.sleep(0.05)
        await engine.run([pass_for("cross_entropy", model_id)])
        await engine.step(model_id, AdamParams(learning_rate=0.05))
        await engine.capture(model_id, name)
        return await running, wanted

    assert_same_samples(*wait(replaced()))
    wait(engine.detach(name))
    assert engine.sampler.batch.prefix_cache.tokens == before
    assert engine.sampler.batch.kv_cache.tokens == 0


def test_a_cancelled_group_leaves_nothing(engine: Any, wait: Any, space: str):
    wanted = alone(engine, wait, max_tokens=40)

    async def cancelled() -> None:
        doomed = ask(PROMPT, num_samples=8, max_tokens=400, cache_scope=space)
        running = asyncio.create_task(engine.sample(doomed))
        await asyncio.sleep(0.05)
        await engine.cancel(doomed.request_id)
        with pytest.raises(Gone):
            await running

    wait(cancelled())
    assert engine.sampler.batch.kv_cache.tokens == 0
    found = wait(engine.sample(ask(PROMPT, num_samples=8, max_tokens=40, cache_scope=space)))
    assert_same_samples(SampleResult(sequences=found.sequences[:2]), wanted)


def test_a_prompt_longer_than_a_pass_joins_a_running_batch(engine_of: Any, wait: Any, space: str):
    engine = engine_of("llama", pass_tokens=64)

    async def order() -> list[str]:
        ended: list[str] = []

        async def one(name: str, **settings: Any) -> None:
            await engine.sample(ask(cache_scope=space, **settings))
            ended.append(name)

        running = asyncio.create_task(one("long answer", max_tokens=400))
        await asyncio.sleep(0.05)
        await asyncio.gather(running, one("long prompt", prompt=PROMPT, max_tokens=2))
        return ended

    assert wait(order()) == ["long prompt", "long answer"]


def test_a_stem_that_nobody_could_go_on_from_is_given_back(
    engine: Any, wait: Any, space: str, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as broken:
        broken.setattr(engine.sampler.batch.kv_cache, "insert_after", lambda *_: 1 / 0)
        with pytest.raises(EngineError):
            wait(engine.sample(ask(PROMPT, num_samples=GROUP, cache_scope=space)))
    assert engine.sampler.batch.kv_cache.tokens == 0
    assert len(wait(engine.sample(ask(PROMPT, num_samples=GROUP, cache_scope=space))).sequences) == GROUP
