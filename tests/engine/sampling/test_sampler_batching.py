"""Many requests in one running batch: nobody's samples depend on who else is there, and versions never change."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.data import pass_for
from tests.engine.sampling.helpers import PROMPT, ask, assert_same_samples
from tinsmith.engine.base import AdamParams, LoraSpec, SampleRequest, SampleResult
from tinsmith.errors import Gone, TinsmithError


@pytest.fixture
def versions(pair: Any, wait: Any) -> Any:
    """Two versions of one engine with adapters of other ranks, beside the base model."""
    made = [pair(), pair(lora=LoraSpec(rank=9, seed=4, train_attn=False))]
    engine = made[0][0]
    names = [f"{model_id}-version" for _, model_id, _ in made]
    for (_, model_id, _), name in zip(made, names, strict=True):
        wait(engine.capture(model_id, name))
    yield engine, [None, *names]
    for name in names:
        wait(engine.detach(name))


def crowd(names: list[str | None]) -> list[dict[str, Any]]:
    """Requests of many shapes: lengths, versions, temperatures, groups, stops; some share prompts."""
    draw = np.random.default_rng(6)
    prompts = [PROMPT, PROMPT[:5], (*PROMPT, 9, 9, 10), tuple(int(token) for token in draw.integers(3, 500, 60))]
    return [
        {
            "prompt": prompts[index % 4],
            "version": names[index % 3],
            "max_tokens": int(draw.integers(1, 40)),
            "num_samples": 1 + index % 4,
            "temperature": (1.0, 0.7, 0.0)[index % 3],
            "top_p": (1.0, 0.9)[index % 2],
            "seed": index,
            "stop_tokens": ((), (410, 17))[index % 2],
        }
        for index in range(24)
    ]


def test_samples_do_not_depend_on_the_company(versions: Any, wait: Any):
    engine, names = versions
    alone = [wait(engine.sample(ask(**settings))) for settings in crowd(names)]

    async def together() -> list[SampleResult]:
        return await asyncio.gather(*(engine.sample(ask(**settings)) for settings in crowd(names)))

    for found, wanted in zip(wait(together()), alone, strict=True):
        assert_same_samples(found, wanted)


def test_requests_join_and_leave_at_any_token(versions: Any, wait: Any):
    engine, names = versions
    alone = [wait(engine.sample(ask(**settings))) for settings in crowd(names)]
    draw = np.random.default_rng(1)

    async def late(delay: float, request: SampleRequest) -> SampleResult:
        await asyncio.sleep(delay)
        return await engine.sample(request)

    async def scattered() -> list[SampleResult]:
        return await asyncio.gather(*(late(float(draw.uniform(0, 0.3)), ask(**settings)) for settings in crowd(names)))

    for found, wanted in zip(wait(scattered()), alone, strict=True):
        assert_same_samples(found, wanted)


def test_more_than_the_cache_holds_waits_its_turn(engine_of: Any, wait: Any):
    small, large = engine_of("llama", cache_tokens=512), engine_of("llama")

    async def all_of(engine: Any) -> list[SampleResult]:
        requests = [ask((*PROMPT, seed + 3), num_samples=4, max_tokens=60, seed=100 + seed) for seed in range(12)]
        return await asyncio.gather(*(engine.sample(request) for request in requests))

    for found, wanted in zip(wait(all_of(small)), wait(all_of(large)), strict=True):
        assert_same_samples(found, wanted)


def test_a_request_that_never_fits_is_an_error_not_a_wait(engine_of: Any, wait: Any):
    engine = engine_of("llama", cache_tokens=512)
    request = ask(num_samples=64, max_tokens=200)

    async def bounded() -> list[Any]:
        served = asyncio.wait_for(engine.sample(request), timeout=60)
        return await asyncio.gather(served, return_exceptions=True)

    (answer,) = wait(bounded())  # either it is served in parts, or it is refused by name
    assert isinstance(answer, TinsmithError) or len(answer.sequences) == 64, answer
    assert wait(engine.sample(ask())).sequences


def test_training_beside_sampling_disturbs_neither(versions: Any, pair: Any, wait: Any):
    engine, names = versions
    _, model_id, oracle = pair(lora=LoraSpec(rank=2, seed=8))
    request = pass_for("cross_entropy", model_id)
    settings = [{**one, "max_tokens": 40} for one in crowd(names)[:6]]
    alone = [wait(engine.sample(ask(**one))) for one in settings]

    async def both() -> tuple[list[SampleResult], list[Any]]:
        samples = asyncio.gather(*(engine.sample(ask(**one)) for one in settings))
        passes = [(await engine.run([request]))[0] for _ in range(3)]
        return await samples, passes

    samples, passes = wait(both())
    for found, wanted in zip(samples, alone, strict=True):
        assert_same_samples(found, wanted)
    wanted_loss = float(oracle.loss(request)[0].detach())
    for result in passes:
        assert result.metrics["loss:sum"] == pytest.approx(wanted_loss, rel=1e-5)


def test_the_same_request_again_gives_the_same_samples(engine: Any, wait: Any):
    first, again = (wait(engine.sample(ask(num_samples=5, max_tokens=30, seed=77))) for _ in range(2))
    assert_same_samples(again, first, atol=1e-6)


def test_the_samples_of_one_request_differ_and_so_do_seeds(engine: Any, wait: Any):
    one, two = (wait(engine.sample(ask(num_samples=16, seed=seed))) for seed in (1, 2))
    lines = [tuple(sequence.tokens.tolist()) for found in (one, two) for sequence in found.sequences]
    assert len(set(lines)) == 32


def test_without_a_seed_every_request_is_new(engine: Any, wait: Any):
    lines = [tuple(wait(engine.sample(ask(seed=None))).sequences[0].tokens.tolist()) for _ in range(4)]
    assert len(set(lines)) == 4


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**64 - 1])
def test_any_number_of_64_bits_is_a_seed(seed: int, engine: Any, wait: Any):
    first, again = (wait(engine.sample(ask(num_samples=2, seed=seed))) for _ in range(2))
    assert_same_samples(again, first)


def test_a_version_never_changes(pair: Any, wait: Any, tmp_path: Path):
    engine, model_id, _ = pair()
    wait(engine.capture(model_id, "early"))
    before = wait(engine.sample(ask(version="early", num_samples=3)))
    wait(engine.run([pass_for("cross_entropy", model_id)]))
    wait(engine.step(model_id, AdamParams(learning_rate=0.05)))
    wait(engine.capture(model_id, "late"))
    late = wait(engine.sample(ask(version="late", num_samples=3)))
    with pytest.raises(AssertionError):
        assert_same_samples(late, before)
    assert_same_samples(wait(engine.sample(ask(version="early", num_samples=3))), before)
    wait(engine.drop(model_id))
    assert_same_samples(wait(engine.sample(ask(version="early", num_samples=3))), before)
    assert wait(engine.persist("early", tmp_path / "early")) > 0
    assert_same_samples(wait(engine.sample(ask(version="early", num_samples=3))), before)
    wait(engine.attach("copy", tmp_path / "early"))
    assert_same_samples(wait(engine.sample(ask(version="copy", num_samples=3))), before)
    wait(engine.detach("early"))
    assert_same_samples(wait(engine.sample(ask(version="copy", num_samples=3))), before)
    for name in ("late", "copy"):
        wait(engine.detach(name))


def test_a_version_that_changes_hands_while_a_request_runs(pair: Any, wait: Any):
    """Steps and new captures between two tokens of a running request must not reach it."""
    engine, model_id, _ = pair()
    wait(engine.capture(model_id, "mine"))
    wanted = wait(engine.sample(ask(version="mine", max_tokens=120)))

    async def disturbed() -> SampleResult:
        running = asyncio.create_task(engine.sample(ask(version="mine", max_tokens=120)))
        for index in range(4):
            await engine.run([pass_for("cross_entropy", model_id, seed=index)])
            await engine.step(model_id, AdamParams(learning_rate=0.05))
            await engine.capture(model_id, f"other-{index}")
        return await running

    assert_same_samples(wait(disturbed()), wanted)
    for name in ("mine", *(f"other-{index}" for index in range(4))):
        wait(engine.detach(name))


def test_an_unknown_version_is_gone(engine: Any, pair: Any, wait: Any):
    with pytest.raises(Gone):
        wait(engine.sample(ask(version="nobody")))
    _, model_id, _ = pair()
    wait(engine.capture(model_id, "short"))
    wait(engine.detach("short"))
    wait(engine.detach("short"))
    with pytest.raises(Gone):
        wait(engine.sample(ask(version="short")))


def test_a_folder_that_cannot_be_read_fails_its_own_requests(engine: Any, wait: Any, tmp_path: Path):
    async def try_it() -> None:
        await engine.attach("nowhere", tmp_path / "nothing")
        await engine.sample(ask(version="nowhere"))

    with pytest.raises(TinsmithError):
        wait(try_it())
    assert wait(engine.sample(ask())).sequences
    wait(engine.detach("nowhere"))


def test_a_request_that_breaks_a_pass_fails_alone_and_at_once(engine: Any, wait: Any):
    """The service refuses such an id before it gets here; if one slips through, nobody may wait for ever."""

    async def both() -> list[Any]:
        asked = (engine.sample(ask((*PROMPT[:4], 99_999))), engine.sample(ask()))
        return await asyncio.gather(*(asyncio.wait_for(one, timeout=20) for one in asked), return_exceptions=True)

    bad, good = wait(both())
    assert isinstance(bad, TinsmithError), bad
    assert isinstance(good, SampleResult), good
    assert wait(engine.sample(ask())).sequences


def test_a_cancelled_request_is_gone_and_the_others_go_on(engine: Any, wait: Any):
    wanted = wait(engine.sample(ask(max_tokens=100)))

    async def cancelled() -> tuple[Any, SampleResult]:
        doomed = ask(max_tokens=200, num_samples=8)
        running = asyncio.create_task(engine.sample(doomed))
        beside = asyncio.create_task(engine.sample(ask(max_tokens=100)))
        await asyncio.sleep(0.05)
        held = engine.sampler.batch.kv_cache.tokens
        await engine.cancel(doomed.request_id)
        assert engine.sampler.batch.kv_cache.tokens < held / 4  # its eight rows are free at once
        with pytest.raises(Gone):
            await running
        return None, await beside

    assert_same_samples(wait(cancelled())[1], wanted)
    wait(engine.cancel("nobody"))
    assert_same_samples(wait(engine.sample(ask(max_tokens=100))), wanted)


def test_a_caller_who_goes_away_leaves_no_trace(engine: Any, wait: Any):
    async def abandoned() -> None:
        running = asyncio.create_task(engine.sample(ask(max_tokens=200, num_samples=8)))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    wait(abandoned())
    assert len(wait(engine.sample(ask(num_samples=2))).sequences) == 2


def test_whoever_waits_is_told_when_it_cannot_be_found_out_who_comes_next(
    engine: Any, wait: Any, monkeypatch: pytest.MonkeyPatch
):
    wanted = wait(engine.sample(ask(max_tokens=60)))

    async def main() -> list[Any]:
        begun = asyncio.Event()
        running = asyncio.create_task(engine.sample(ask(max_tokens=60), lambda _: begun.set()))
        await begun.wait()
        with monkeypatch.context() as broken:
            broken.setattr(engine.sampler.batch, "_match", lambda _: 1 / 0)
            (waiting,) = await asyncio.gather(engine.sample(ask()), return_exceptions=True)
        return [waiting, await running]

    waiting, found = wait(main())
    assert isinstance(waiting, TinsmithError)
    assert_same_samples(found, wanted)
    assert wait(engine.sample(ask())).sequences
