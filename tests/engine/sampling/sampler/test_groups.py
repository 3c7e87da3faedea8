"""Groups of sequences that share one prompt row: same samples, less memory."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.engine.data import pass_for
from tests.engine.sampling.helpers import assert_same_samples, sample_request, sampling
from tests.models import KINDS
from tinsmith.engine.base import AdamParams, SampleResult
from tinsmith.errors import EngineError, Gone

PROMPT = tuple(int(token) for token in np.random.default_rng(11).integers(3, 500, 900))
GROUP = 6


def sample_pair(engine: Any, wait: Any, prompt: Any = PROMPT, **settings: Any) -> SampleResult:
    """The first two samples of a group, which are too few to share the prompt."""
    return wait(engine.sample(sample_request(prompt, num_samples=2, **settings)))


@pytest.mark.parametrize("kind", KINDS)
def test_group_samples_equal_those_of_a_small_group(kind: str, engine_of: Any, wait: Any, cache_scope: str):
    engine, fresh = engine_of(kind), engine_of(kind, cache_tokens=1)
    result = wait(
        engine.sample(sample_request(num_samples=GROUP, prompt=PROMPT, max_tokens=100, cache_scope=cache_scope))
    )
    expected = sample_pair(fresh, wait, max_tokens=100)
    assert_same_samples(SampleResult(sequences=result.sequences[:2]), expected)
    assert len({tuple(sequence.tokens.tolist()) for sequence in result.sequences}) == GROUP


def test_group_stores_its_prompt_once(engine: Any, wait: Any, cache_scope: str):
    sampler, observed = engine.sampler, list[int]()
    request = sample_request(PROMPT, num_samples=8, max_tokens=30, cache_scope=cache_scope)
    wait(engine.sample(request, lambda _: observed.append(sampler.batch.kv_cache.tokens)))
    assert observed[-1] == 1024 + 8 * 64
    assert sampler.batch.kv_cache.tokens == 0


def test_group_reserves_its_prompt_once(engine_of: Any, wait: Any, cache_scope: str):
    """Two groups run at once in a cache that could not hold a copy of the prompt for each sequence of one."""
    engine = engine_of("llama", cache_tokens=3100)
    observed: list[int] = []

    async def run_both() -> None:
        requests = [
            sample_request((seed, *PROMPT), num_samples=8, max_tokens=30, cache_scope=cache_scope) for seed in (5, 6)
        ]
        await asyncio.gather(
            *(
                engine.sample(request, lambda _: observed.append(len(engine.sampler.batch.sequences)))
                for request in requests
            )
        )

    wait(run_both())
    assert max(observed) == 16


def test_requests_with_equal_and_other_prompts_mix(engine: Any, engine_of: Any, wait: Any, cache_scope: str):
    """Single requests share prompts too; some prompts extend a shared one, others do not, one has prompt_logprobs."""
    fresh = engine_of("llama", cache_tokens=1)
    prompts = [PROMPT] * 5 + [PROMPT[:880]] * 4 + [(*PROMPT, 5, 6), (8, 9), PROMPT[:100]]

    async def sample_all(target: Any) -> list[SampleResult]:
        requests = [
            sample_request(
                prompt, seed=seed, max_tokens=2 * seed - 30, prompt_logprobs=seed == 22, cache_scope=cache_scope
            )
            for seed, prompt in enumerate(prompts, 20)
        ]
        return await asyncio.gather(*(target.sample(request) for request in requests))

    for _ in range(2):
        results = wait(sample_all(engine))
        for seed, (target, prompt) in enumerate(zip(results, prompts, strict=True), 20):
            assert_same_samples(target, wait(fresh.sample(sample_request(prompt, seed=seed, max_tokens=2 * seed - 30))))


def test_each_sequence_of_a_group_can_be_continued(engine: Any, engine_of: Any, wait: Any, cache_scope: str):
    fresh = engine_of("llama", cache_tokens=1)
    first = wait(engine.sample(sample_request(PROMPT, num_samples=GROUP, max_tokens=30, cache_scope=cache_scope)))
    for sequence in first.sequences:
        prompt = (*PROMPT, *sequence.tokens.tolist(), 4, 5)
        second = wait(engine.sample(sample_request(prompt, num_samples=4, max_tokens=30, cache_scope=cache_scope)))
        assert second.prompt_cache_hit_tokens == len(PROMPT) + 29
        assert_same_samples(
            SampleResult(sequences=second.sequences[:2]), sample_pair(fresh, wait, prompt, max_tokens=30)
        )


def test_group_survives_eviction_of_its_prompt(engine_of: Any, wait: Any, cache_scope: str):
    small, large = engine_of("llama", cache_tokens=1800), engine_of("llama")

    async def crowded() -> SampleResult:
        request = sample_request(PROMPT, num_samples=4, max_tokens=150, cache_scope=cache_scope)
        running = await sampling(small, request)
        for seed in range(6):
            await small.sample(sample_request((seed + 20, *PROMPT[:750]), max_tokens=20, cache_scope=cache_scope))
        return await running

    assert_same_samples(wait(crowded()), wait(large.sample(sample_request(PROMPT, num_samples=4, max_tokens=150))))
    assert small.sampler.batch.kv_cache.tokens == 0
    assert small.sampler.batch.prefix_cache.tokens <= 1800


def test_group_survives_replacement_of_its_version(engine: Any, pair: Any, wait: Any, cache_scope: str):
    _, model_id, _ = pair()
    name, before = f"{model_id}-v", engine.sampler.batch.prefix_cache.tokens
    wait(engine.capture(model_id, name))
    wait(engine.capture(model_id, f"{name}-2"))

    async def replaced() -> tuple[SampleResult, SampleResult]:
        settings = {"num_samples": 4, "max_tokens": 120}
        expected = await engine.sample(sample_request(PROMPT, version=f"{name}-2", **settings))
        await engine.detach(f"{name}-2")
        running = await sampling(engine, sample_request(PROMPT, version=name, cache_scope=cache_scope, **settings))
        await engine.run([pass_for("cross_entropy", model_id)])
        await engine.step(model_id, AdamParams(learning_rate=0.05))
        await engine.capture(model_id, name)
        return await running, expected

    assert_same_samples(*wait(replaced()))
    wait(engine.detach(name))
    assert engine.sampler.batch.prefix_cache.tokens == before
    assert engine.sampler.batch.kv_cache.tokens == 0


def test_cancelled_group_frees_its_rows(engine: Any, wait: Any, cache_scope: str):
    expected = sample_pair(engine, wait, max_tokens=40)

    async def cancelled() -> None:
        doomed = sample_request(PROMPT, num_samples=8, max_tokens=400, cache_scope=cache_scope)
        running = await sampling(engine, doomed)
        await engine.cancel(doomed.request_id)
        with pytest.raises(Gone):
            await running

    wait(cancelled())
    assert engine.sampler.batch.kv_cache.tokens == 0
    actual = wait(engine.sample(sample_request(PROMPT, num_samples=8, max_tokens=40, cache_scope=cache_scope)))
    assert_same_samples(SampleResult(sequences=actual.sequences[:2]), expected)


def test_prompt_longer_than_a_pass_joins_running_batch(engine_of: Any, wait: Any, cache_scope: str):
    engine = engine_of("llama", pass_tokens=64)

    async def order() -> list[str]:
        ended: list[str] = []

        async def wait_for(name: str, running: asyncio.Task[SampleResult]) -> None:
            await running
            ended.append(name)

        long = await sampling(engine, sample_request(cache_scope=cache_scope, max_tokens=400))
        late = await sampling(engine, sample_request(PROMPT, cache_scope=cache_scope, max_tokens=2))
        await asyncio.gather(wait_for("long answer", long), wait_for("long prompt", late))
        return ended

    assert wait(order()) == ["long prompt", "long answer"]


def test_shared_prefix_without_readers_is_freed(
    engine: Any, wait: Any, cache_scope: str, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as broken:
        broken.setattr(engine.sampler.batch.kv_cache, "insert_after", lambda *_: 1 / 0)
        with pytest.raises(EngineError):
            wait(engine.sample(sample_request(PROMPT, num_samples=GROUP, cache_scope=cache_scope)))
    assert engine.sampler.batch.kv_cache.tokens == 0
    assert (
        len(wait(engine.sample(sample_request(PROMPT, num_samples=GROUP, cache_scope=cache_scope))).sequences) == GROUP
    )
