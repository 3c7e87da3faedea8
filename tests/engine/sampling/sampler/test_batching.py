"""Many requests in one running batch, and versions during training."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.data import pass_for
from tests.engine.sampling.helpers import PROMPT, assert_same_samples, sample_request, sampling
from tinsmith.engine.base import AdamParams, LoraSpec, SampleRequest, SampleResult
from tinsmith.errors import Gone, TinsmithError


@pytest.fixture
def versions(pair: Any, wait: Any) -> Any:
    """The base model (None) and two versions with adapters of different ranks."""
    made = [pair(), pair(lora=LoraSpec(rank=9, seed=4, train_attn=False))]
    engine = made[0][0]
    names = [f"{model_id}-version" for _, model_id, _ in made]
    for (_, model_id, _), name in zip(made, names, strict=True):
        wait(engine.capture(model_id, name))
    yield engine, [None, *names]
    for name in names:
        wait(engine.detach(name))


def mixed_requests(names: list[str | None]) -> list[dict[str, Any]]:
    """Requests of many shapes: lengths, versions, temperatures, groups, stops; some share prompts."""
    rng = np.random.default_rng(6)
    prompts = [PROMPT, PROMPT[:5], (*PROMPT, 9, 9, 10), tuple(int(token) for token in rng.integers(3, 500, 60))]
    return [
        {
            "prompt": prompts[index % 4],
            "version": names[index % 3],
            "max_tokens": int(rng.integers(1, 40)),
            "num_samples": 1 + index % 4,
            "temperature": (1.0, 0.7, 0.0)[index % 3],
            "top_p": (1.0, 0.9)[index % 2],
            "seed": index,
            "stop_tokens": ((), (410, 17))[index % 2],
        }
        for index in range(24)
    ]


def test_samples_do_not_depend_on_other_requests(versions: Any, wait: Any):
    engine, names = versions
    alone = [wait(engine.sample(sample_request(**settings))) for settings in mixed_requests(names)]

    async def together() -> list[SampleResult]:
        return await asyncio.gather(*(engine.sample(sample_request(**settings)) for settings in mixed_requests(names)))

    for actual, expected in zip(wait(together()), alone, strict=True):
        assert_same_samples(actual, expected)


def test_samples_do_not_depend_on_arrival_times(versions: Any, wait: Any):
    engine, names = versions
    alone = [wait(engine.sample(sample_request(**settings))) for settings in mixed_requests(names)]
    rng = np.random.default_rng(1)

    async def late(delay: float, request: SampleRequest) -> SampleResult:
        await asyncio.sleep(delay)
        return await engine.sample(request)

    async def scattered() -> list[SampleResult]:
        return await asyncio.gather(
            *(late(float(rng.uniform(0, 0.3)), sample_request(**settings)) for settings in mixed_requests(names))
        )

    for actual, expected in zip(wait(scattered()), alone, strict=True):
        assert_same_samples(actual, expected)


def test_requests_beyond_the_cache_wait(engine_of: Any, wait: Any):
    small, large = engine_of("llama", cache_tokens=128), engine_of("llama")

    async def all_of(engine: Any) -> list[SampleResult]:
        requests = [
            sample_request((*PROMPT, seed + 3), num_samples=4, max_tokens=16, seed=300 + seed) for seed in range(12)
        ]
        return await asyncio.gather(*(engine.sample(request) for request in requests))

    for actual, expected in zip(wait(all_of(small)), wait(all_of(large)), strict=True):
        assert_same_samples(actual, expected)


def test_request_larger_than_the_cache_does_not_hang(engine_of: Any, wait: Any):
    engine = engine_of("llama", cache_tokens=128)
    request = sample_request(num_samples=64, max_tokens=50)

    async def bounded() -> list[Any]:
        served = asyncio.wait_for(engine.sample(request), timeout=240)
        return await asyncio.gather(served, return_exceptions=True)

    (answer,) = wait(bounded())  # it is either served in parts or refused
    assert isinstance(answer, TinsmithError) or len(answer.sequences) == 64, answer
    assert wait(engine.sample(sample_request())).sequences


def test_training_and_sampling_do_not_affect_each_other(versions: Any, pair: Any, wait: Any):
    engine, names = versions
    _, model_id, oracle = pair(lora=LoraSpec(rank=2, seed=8))
    request = pass_for("cross_entropy", model_id)
    settings = [{**setting, "max_tokens": 40} for setting in mixed_requests(names)[:6]]
    alone = [wait(engine.sample(sample_request(**setting))) for setting in settings]

    async def run_both() -> tuple[list[SampleResult], list[Any]]:
        samples = asyncio.gather(*(engine.sample(sample_request(**setting)) for setting in settings))
        passes = [(await engine.run([request]))[0] for _ in range(3)]
        return await samples, passes

    samples, passes = wait(run_both())
    for actual, expected in zip(samples, alone, strict=True):
        assert_same_samples(actual, expected)
    wanted_loss = float(oracle.loss(request)[0].detach())
    for result in passes:
        assert result.metrics["loss:sum"] == pytest.approx(wanted_loss, rel=1e-5)


def test_repeated_request_gives_the_same_samples(engine: Any, wait: Any):
    first, again = (wait(engine.sample(sample_request(num_samples=5, max_tokens=30, seed=77))) for _ in range(2))
    assert_same_samples(again, first, atol=1e-6)


def test_samples_and_seeds_differ(engine: Any, wait: Any):
    first, second = (wait(engine.sample(sample_request(num_samples=16, seed=seed))) for seed in (1, 2))
    lines = [tuple(sequence.tokens.tolist()) for result in (first, second) for sequence in result.sequences]
    assert len(set(lines)) == 32


def test_requests_without_seed_differ(engine: Any, wait: Any):
    lines = [tuple(wait(engine.sample(sample_request(seed=None))).sequences[0].tokens.tolist()) for _ in range(4)]
    assert len(set(lines)) == 4


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**64 - 1])
def test_any_64_bit_integer_is_a_seed(seed: int, engine: Any, wait: Any):
    first, again = (wait(engine.sample(sample_request(num_samples=2, seed=seed))) for _ in range(2))
    assert_same_samples(again, first)


def test_version_never_changes(pair: Any, wait: Any, tmp_path: Path):
    engine, model_id, _ = pair()
    wait(engine.capture(model_id, "early"))
    before = wait(engine.sample(sample_request(version="early", num_samples=3)))
    wait(engine.run([pass_for("cross_entropy", model_id)]))
    wait(engine.step(model_id, AdamParams(learning_rate=0.05)))
    wait(engine.capture(model_id, "late"))
    late = wait(engine.sample(sample_request(version="late", num_samples=3)))
    with pytest.raises(AssertionError):
        assert_same_samples(late, before)
    assert_same_samples(wait(engine.sample(sample_request(version="early", num_samples=3))), before)
    wait(engine.drop(model_id))
    assert_same_samples(wait(engine.sample(sample_request(version="early", num_samples=3))), before)
    assert wait(engine.persist("early", tmp_path / "early")) > 0
    assert_same_samples(wait(engine.sample(sample_request(version="early", num_samples=3))), before)
    wait(engine.attach("copy", tmp_path / "early"))
    assert_same_samples(wait(engine.sample(sample_request(version="copy", num_samples=3))), before)
    wait(engine.detach("early"))
    assert_same_samples(wait(engine.sample(sample_request(version="copy", num_samples=3))), before)
    for name in ("late", "copy"):
        wait(engine.detach(name))


def test_running_request_keeps_its_version_during_training(pair: Any, wait: Any):
    """Steps and captures between two tokens of a running request must not affect it."""
    engine, model_id, _ = pair()
    wait(engine.capture(model_id, "mine"))
    expected = wait(engine.sample(sample_request(version="mine", max_tokens=120)))

    async def disturbed() -> SampleResult:
        running = asyncio.create_task(engine.sample(sample_request(version="mine", max_tokens=120)))
        for index in range(4):
            await engine.run([pass_for("cross_entropy", model_id, seed=index)])
            await engine.step(model_id, AdamParams(learning_rate=0.05))
            await engine.capture(model_id, f"other-{index}")
        return await running

    assert_same_samples(wait(disturbed()), expected)
    for name in ("mine", *(f"other-{index}" for index in range(4))):
        wait(engine.detach(name))


def test_unknown_version_raises_gone(engine: Any, pair: Any, wait: Any):
    with pytest.raises(Gone):
        wait(engine.sample(sample_request(version="nobody")))
    _, model_id, _ = pair()
    wait(engine.capture(model_id, "short"))
    wait(engine.detach("short"))
    wait(engine.detach("short"))
    with pytest.raises(Gone):
        wait(engine.sample(sample_request(version="short")))


def test_unreadable_folder_fails_its_own_requests(engine: Any, wait: Any, tmp_path: Path):
    async def try_it() -> None:
        await engine.attach("nowhere", tmp_path / "nothing")
        await engine.sample(sample_request(version="nowhere"))

    with pytest.raises(TinsmithError):
        wait(try_it())
    assert wait(engine.sample(sample_request())).sequences
    wait(engine.detach("nowhere"))


def test_request_that_breaks_a_pass_fails_alone(engine: Any, wait: Any):
    """The service rejects such a token id; if one reaches the engine, no request may hang."""

    async def run_both() -> list[Any]:
        calls = (engine.sample(sample_request((*PROMPT[:4], 99_999))), engine.sample(sample_request()))
        return await asyncio.gather(*(asyncio.wait_for(call, timeout=240) for call in calls), return_exceptions=True)

    bad, good = wait(run_both())
    assert isinstance(bad, TinsmithError), bad
    assert isinstance(good, SampleResult), good
    assert wait(engine.sample(sample_request())).sequences


def test_cancelled_request_frees_its_rows_at_once(engine: Any, wait: Any):
    expected = wait(engine.sample(sample_request(max_tokens=100)))

    async def cancelled() -> tuple[Any, SampleResult]:
        doomed = sample_request(max_tokens=200, num_samples=8)
        running = await sampling(engine, doomed, tokens=40)
        beside = await sampling(engine, sample_request(max_tokens=100))
        held = engine.sampler.batch.kv_cache.tokens
        await engine.cancel(doomed.request_id)
        assert engine.sampler.batch.kv_cache.tokens < held / 4  # its eight rows are freed at once
        with pytest.raises(Gone):
            await running
        return None, await beside

    assert_same_samples(wait(cancelled())[1], expected)
    wait(engine.cancel("nobody"))
    assert_same_samples(wait(engine.sample(sample_request(max_tokens=100))), expected)


def test_cancelled_caller_does_not_break_the_sampler(engine: Any, wait: Any):
    async def abandoned() -> None:
        running = await sampling(engine, sample_request(max_tokens=200, num_samples=8))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    wait(abandoned())
    assert len(wait(engine.sample(sample_request(num_samples=2))).sequences) == 2


def test_scheduling_error_fails_waiting_requests_only(engine: Any, wait: Any, monkeypatch: pytest.MonkeyPatch):
    expected = wait(engine.sample(sample_request(max_tokens=60)))

    async def main() -> list[Any]:
        begun = asyncio.Event()
        running = asyncio.create_task(engine.sample(sample_request(max_tokens=60), lambda _: begun.set()))
        await begun.wait()
        with monkeypatch.context() as broken:
            broken.setattr(engine.sampler.batch, "_match", lambda _: 1 / 0)
            (waiting,) = await asyncio.gather(engine.sample(sample_request()), return_exceptions=True)
        return [waiting, await running]

    waiting, actual = wait(main())
    assert isinstance(waiting, TinsmithError)
    assert_same_samples(actual, expected)
    assert wait(engine.sample(sample_request())).sequences
