"""Decoding over pages on a CPU: the tokens of the banks, whatever joins and leaves, and as a recorded graph."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.data import pass_for
from tests.engine.device.programs import ADAM, engine_on_cpu
from tests.engine.sampling.helpers import PROMPT, assert_same_samples, sample_request, sampling
from tests.engine.sampling.paged.recorded import CountingCapture, Recorder
from tinsmith.engine.base import LoraSpec, SampleRequest, SampleResult, SequenceDelta
from tinsmith.engine.sampling import scheduler
from tinsmith.engine.sampling.paged import adapter_slots, pages
from tinsmith.engine.sampling.paged.step import DecodeStep, Graph
from tinsmith.engine.torch_engine import TorchEngine
from tinsmith.errors import BadRequest

Build = Callable[..., TorchEngine]
LONG = tuple(np.random.default_rng(0).integers(3, 400, 150).tolist())


async def with_versions(engine: TorchEngine, count: int = 3) -> TorchEngine:
    """An engine with trained versions v0, v1, … of different ranks."""
    for number in range(count):
        await engine.create(f"m{number}", LoraSpec(rank=2 << number, seed=number))
        await engine.run([pass_for("ppo", f"m{number}", seed=number)])
        await engine.step(f"m{number}", replace(ADAM, learning_rate=0.05))
        await engine.capture(f"m{number}", f"v{number}")
    return engine


REQUESTS = (
    {"num_samples": 3, "max_tokens": 55, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "version": "v0"},
    {"num_samples": 2, "max_tokens": 5, "topk_sample_logprobs": 3, "version": "v1"},
    {"prompt": LONG, "num_samples": 4, "max_tokens": 9, "version": "v2"},
    {"prompt": LONG, "max_tokens": 1, "prompt_logprobs": True},
    {"max_tokens": 40, "temperature": 0.0, "version": "v2"},
    {"num_samples": 4, "max_tokens": 30, "stop_tokens": tuple(range(0, 500, 9))},
    {"num_samples": 2, "max_tokens": 30, "stop_strings": ("e", "an")},
)


@pytest.fixture(scope="module")
def banks(llama: Path) -> TorchEngine:
    engine = engine_on_cpu(llama)
    return asyncio.run(with_versions(engine))


async def in_turns(engine: TorchEngine, turns: Sequence[tuple[int, int]]) -> list[SampleResult | None]:
    """Results of requests that start a number of tokens after each other; None of those that are cancelled then."""
    tasks: list[asyncio.Task[SampleResult]] = []
    results: list[SampleResult | None] = []
    cancelled: list[bool] = []
    for number, (kind, tokens) in enumerate(turns):
        request = sample_request(**{"seed": number, **REQUESTS[kind]})
        tasks.append(await sampling(engine, request, tokens))
        cancelled.append(tokens == 4)
        if cancelled[-1]:
            await engine.cancel(request.request_id)
    for task, is_cancelled in zip(tasks, cancelled, strict=True):
        [outcome] = await asyncio.gather(task, return_exceptions=True)
        results.append(None if is_cancelled or isinstance(outcome, BaseException) else outcome)
    return results


@pytest.fixture(scope="module")
def in_pages(paged: Build, llama: Path) -> TorchEngine:
    engine = paged(llama)
    return asyncio.run(with_versions(engine))


@settings(max_examples=4)
@given(turns=st.lists(st.tuples(st.integers(0, len(REQUESTS) - 1), st.integers(1, 4)), min_size=2, max_size=5))
def test_any_history_gives_the_tokens_of_banks(
    in_pages: TorchEngine, banks: TorchEngine, turns: list[tuple[int, int]]
) -> None:
    engine = in_pages

    async def compare() -> None:
        pairs = zip(await in_turns(engine, turns), await in_turns(banks, turns), strict=True)
        for actual, expected in pairs:
            assert (actual is None) == (expected is None)
            if actual is not None and expected is not None:
                assert_same_samples(actual, expected)

    asyncio.run(compare())
    assert engine.sampler.batch.kv_cache.tokens == 0


async def results(engine: TorchEngine, *requests: SampleRequest) -> list[SampleResult]:
    return list(await asyncio.gather(*map(engine.sample, requests)))


def all_requests() -> list[SampleRequest]:
    return [sample_request(**{"seed": seed, **request}) for seed, request in enumerate(REQUESTS)]


@pytest.mark.usefixtures("operators_alone")
def test_recorded_steps_give_the_tokens_of_banks(paged: Build, llama: Path) -> None:
    """What is replayed depends on nothing that the host knew when it was recorded."""
    banks = asyncio.run(with_versions(engine_on_cpu(llama)))
    counted = CountingCapture()
    engine = paged(llama, counted)
    asyncio.run(with_versions(engine))
    for actual, expected in zip(
        asyncio.run(results(engine, *all_requests())), asyncio.run(results(banks, *all_requests())), strict=True
    ):
        assert_same_samples(actual, expected)
    assert counted.replays > 40


def test_step_that_cannot_be_captured_is_started_each_time(
    paged: Build, llama: Path, banks: TorchEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Callable[[], None]) -> Graph:
        raise RuntimeError("operation not permitted when stream is capturing")

    request = sample_request(num_samples=3, max_tokens=12)
    [actual], [expected] = (asyncio.run(results(engine, request)) for engine in (paged(llama, refuse), banks))
    assert_same_samples(actual, expected)
    assert caplog.text.count("cannot be a CUDA graph") == 1


@pytest.mark.usefixtures("operators_alone")
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9, "topk_sample_logprobs": 4}], ids=["plain", "restricted"])
def test_steps_are_the_same_operators_on_the_same_addresses(
    paged: Build, llama: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """And none of them gives a value to the host."""
    signatures: list[list[tuple[Any, ...]]] = []
    compute = DecodeStep._compute

    def recorded(step: DecodeStep, shape: Any, *spans: Any) -> None:
        with Recorder() as recorder:
            compute(step, shape, *spans)
        signatures.append([shape, *recorder.signature()])

    monkeypatch.setattr(DecodeStep, "_compute", recorded)
    engine = paged(llama)

    async def work() -> None:
        await with_versions(engine)
        requests = [sample_request(version=f"v{number % 3}", max_tokens=20, **settings) for number in range(7)]
        await results(engine, *requests)

    asyncio.run(work())
    assert len(signatures) == 19
    for signature in signatures[1:]:
        assert [pair for pair in zip(signature, signatures[0], strict=True) if pair[0] != pair[1]] == []
    assert not [row[0] for row in signatures[0][1:] if "_local_scalar_dense" in row[0] or "nonzero" in row[0]]


def test_tokens_after_a_late_stop_are_cut(in_pages: TorchEngine) -> None:
    """A sequence ends with the token that completes its stop string, and no later token is sent or cached."""
    engine = in_pages

    async def work() -> None:
        free = await engine.sample(sample_request(max_tokens=20))
        tokens = free.sequences[0].tokens
        stop = int(tokens[7])
        end = int(np.flatnonzero(tokens == stop)[0]) + 1
        deltas: list[SequenceDelta] = []
        stopped = await engine.sample(sample_request(max_tokens=20, stop_tokens=(stop,)), deltas.append)
        assert stopped.sequences[0].tokens.tolist() == tokens[:end].tolist()
        assert [token for delta in deltas for token in delta.tokens] == tokens[:end].tolist()
        turn = [*PROMPT, *tokens[:end].tolist(), 7, 8]
        later, fresh = await results(engine, sample_request(turn, max_tokens=4), sample_request(turn, max_tokens=4))
        assert later.prompt_cache_hit_tokens >= len(PROMPT) + end - 1
        assert later.sequences[0].tokens.tolist() == fresh.sequences[0].tokens.tolist()

    asyncio.run(work())


def test_full_pages_remove_the_last_job_which_starts_again(
    paged: Build, llama: Path, banks: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "FIRST_PAGES", 4)
    monkeypatch.setattr(scheduler, "paged_tokens", lambda *_: 0)  # admits all
    requests = [sample_request(LONG[:62], seed=seed, max_tokens=12) for seed in range(3)]
    engine = paged(llama, cache_tokens=512)
    deltas: list[SequenceDelta] = []

    async def work() -> list[SampleResult]:
        tasks = [asyncio.create_task(engine.sample(request)) for request in requests[:2]]
        return [*await asyncio.gather(*tasks, engine.sample(requests[2], deltas.append))]

    with patch.object(engine.sampler.batch, "remove", wraps=engine.sampler.batch.remove) as remove:
        actual = asyncio.run(work())
    assert remove.call_count
    for result, request in zip(actual, requests, strict=True):
        [expected] = asyncio.run(results(banks, request))
        assert_same_samples(result, expected, atol=1e-4)
    assert [token for delta in deltas for token in delta.tokens] == actual[2].sequences[0].tokens.tolist()


def test_diverged_version_fails_alone(paged: Build, llama: Path) -> None:
    engine = paged(llama)

    async def work() -> list[SampleResult | BaseException]:
        await with_versions(engine, 2)
        await engine.run([pass_for("ppo", "m1")])
        await engine.step("m1", replace(ADAM, learning_rate=1e36))
        await engine.capture("m1", "bad")
        requests = [sample_request(version=version, max_tokens=9) for version in ("v0", "bad", "v0")]
        return list(await asyncio.gather(*map(engine.sample, requests), return_exceptions=True))

    first, bad, last = asyncio.run(work())
    assert isinstance(bad, BadRequest)
    assert isinstance(first, SampleResult)
    assert isinstance(last, SampleResult)


def test_adapters_that_are_too_large_are_not_in_slots(
    paged: Build, llama: Path, banks: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_slots, "most_bytes", lambda _: 1000)
    engine = paged(llama)
    asyncio.run(with_versions(engine))
    requests = [sample_request(version=f"v{number}", max_tokens=12) for number in range(3)]
    for actual, expected in zip(*(asyncio.run(results(each, *requests)) for each in (engine, banks)), strict=True):
        assert_same_samples(actual, expected)
