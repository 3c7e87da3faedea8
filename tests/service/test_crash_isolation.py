"""Crash isolation: a sample that kills engines fails alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.service.support.inprocess import Api, Factory, MortalEngine, api, until
from tinsmith.engine.base import SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.errors import EngineDied, EngineError
from tinsmith.service import sampling
from tinsmith.service.engines.host import MAX_ENGINE_DEATHS, EngineHost
from tinsmith.service.sampling import CrashIsolation

DEADLY = [9, 9, 9]


async def session(app: Api) -> str:
    made = (await app.post("create_session", {"tags": []})).json()["session_id"]
    body = {"session_id": made, "sampling_session_seq_id": 0, "base_model": "toy"}
    return (await app.post("create_sampling_session", body)).json()["sampling_session_id"]


async def sampled(app: Api, sampler: str, prompt: list[int], first: int = 0) -> tuple[int, dict | None]:
    """Submit a sample again after each 410, as the SDK does. Returns (submissions, error or None)."""
    for number in range(10):
        body = {"sampling_session_id": sampler, "seq_id": first + number, "sampling_params": {"max_tokens": 2}}
        promise = await app.post(
            "asample", {**body, "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]}}
        )
        answer = await app.result(promise.json())
        if answer.status_code != 410:
            assert answer.status_code == 200, answer.text
            return number + 1, answer.json() if answer.headers["content-type"] == "application/json" else None
    raise AssertionError("lost ten times")


def deadly(start: Factory):
    def hook(call: str, argument: object):
        if call == "sample" and isinstance(argument, SampleRequest) and list(argument.prompt) == DEADLY:
            start.kill()
        return asyncio.sleep(0.05) if call in ("step", "sample") else None

    return hook


def test_sample_that_kills_engines_fails_and_training_does_not(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            alice, bob = await app.tenant("alice"), await app.tenant("bob")
            model, sampler = await alice.model(), await session(bob)
            start.hook = deadly(start)
            killing = asyncio.create_task(sampled(bob, sampler, DEADLY))
            for seq in range(1, 12):
                assert "metrics" in await alice.step(model, seq)
            attempts, error = await killing
            assert attempts == 3
            assert error is not None
            assert "died 3 times" in error["error"]
            await until(lambda: len(start.made) == 4)
            assert "died 3 times" in ((await sampled(bob, sampler, DEADLY, first=20))[1] or {})["error"]
            assert len(start.made) == 4, "the same prompt is not run again"

    asyncio.run(main())


def test_samples_next_to_one_that_kills_engines_complete(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            sampler = await session(app)
            start.hook = deadly(start)
            prompts = [[5], [6], DEADLY, [7], [5]]
            samples = [sampled(app, sampler, prompt, first=20 * number) for number, prompt in enumerate(prompts)]
            ended = await asyncio.gather(*samples)
            assert [error is None for _, error in ended] == [True, True, False, True, True]

    asyncio.run(main())


def test_samples_lost_together_are_submitted_twice(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            sampler = await session(app)
            engine, dead = start.made[0].engine, asyncio.Event()
            assert isinstance(engine, MortalEngine)
            start.hook = lambda call, _: dead.wait() if call == "sample" and len(start.made) == 1 else None
            group = [asyncio.create_task(sampled(app, sampler, [5, 6], first=20 * number)) for number in range(8)]
            await until(lambda: engine.calls.count("sample") == 8)
            start.kill()
            dead.set()
            assert await asyncio.gather(*group) == [(2, None)] * 8

    asyncio.run(main())


@pytest.mark.parametrize("late", [(True, False, True), (False, True, False), (True, True, True), (False, False, False)])
def test_death_counts_for_the_engine_that_died(late: tuple[bool, ...]) -> None:
    """`late`: the next engine starts before the sample raises EngineDied."""

    async def main() -> None:
        host = EngineHost(EngineConfig(source="toy", kind="fake"), ["toy"], Factory())
        isolation = CrashIsolation()
        request = SampleRequest(request_id="r", prompt=np.asarray(DEADLY, np.int32), max_tokens=2)

        async def attempt(start: int, *, late: bool) -> None:
            host.start_count = start
            async with isolation.isolate(host, "session", request) as running:
                running.engine_start = start
                host.start_count += late
                raise EngineDied("The engine is dead.")

        for start, is_late in enumerate(late[: MAX_ENGINE_DEATHS - 1], 1):
            with pytest.raises(EngineDied):
                await attempt(start, late=is_late)
        with pytest.raises(EngineError, match="died 3 times"):
            await attempt(MAX_ENGINE_DEATHS, late=late[-1])

    asyncio.run(main())


def test_deaths_of_replicas_count_each_under_one_engine() -> None:
    async def main() -> None:
        host = EngineHost(EngineConfig(source="toy", kind="fake"), ["toy"], Factory())
        isolation = CrashIsolation()
        request = SampleRequest(request_id="r", prompt=np.asarray(DEADLY, np.int32), max_tokens=2)

        async def attempt(life: int) -> None:
            async with isolation.isolate(host, "session", request) as running:
                running.engine_start = 1
                death = EngineDied("The replica is dead.")
                death.process = life
                raise death

        for life in (4, 4, 5):
            with pytest.raises(EngineDied):
                await attempt(life)
        with pytest.raises(EngineError, match="died 3 times"):
            await attempt(6)

    asyncio.run(main())


def test_remembered_deaths_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that runs for months sees many requests whose engine died, most of them innocent."""
    monkeypatch.setattr(sampling, "MAX_REMEMBERED", 3)

    async def main() -> None:
        host = EngineHost(EngineConfig(source="toy", kind="fake"), ["toy"], Factory())
        isolation = CrashIsolation()

        async def die(token: int, start: int) -> None:
            request = SampleRequest(request_id="r", prompt=np.asarray([token], np.int32), max_tokens=2)
            async with isolation.isolate(host, "session", request) as running:
                running.engine_start = start
                raise EngineDied("The engine is dead.")

        for start, token in enumerate([1, 2, 3, 1, 4], 1):  # the earliest is 2
            with pytest.raises(EngineDied):
                await die(token, start)
        assert len(isolation._deaths) == 3
        with pytest.raises(EngineError, match="died 3 times"):
            await die(1, 6)

    asyncio.run(main())
