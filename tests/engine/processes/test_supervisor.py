"""Supervision: growing delays between starts, and starts after each end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tinsmith.engine.processes import supervisor
from tinsmith.engine.processes.supervisor import keep_running, start_until_up
from tinsmith.errors import EngineDied, EngineError


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Delays between attempts, none of which passes."""
    recorded: list[float] = []

    async def pass_at_once(seconds: float) -> None:
        recorded.append(seconds)
        await asyncio.sleep(0)

    # The module's own name alone: threads of SDK clients of earlier tests call asyncio.sleep too.
    monkeypatch.setattr(supervisor, "asyncio", SimpleNamespace(sleep=pass_at_once))
    return recorded


def test_delays_double_up_to_the_limit(delays: list[float], caplog: pytest.LogCaptureFixture) -> None:
    errors: list[Exception] = [OSError("no memory")] * 4 + [EngineDied("died")] * 4
    failures: list[int] = []

    async def start() -> str:
        if errors:
            raise errors.pop()
        return "up"

    async def on_failure(failed: int, error: Exception) -> None:
        failures.append(failed)

    assert asyncio.run(start_until_up("It", start, on_failure)) == "up"
    assert delays == [1, 2, 4, 8, 16, 30, 30, 30]
    assert failures == [*range(1, 9)]
    assert "It does not start; next attempt in 16 s." in caplog.text


def test_error_of_the_program_is_no_reason_to_try_again(delays: list[float]) -> None:
    async def start() -> None:
        raise KeyError("a defect")

    with pytest.raises(KeyError):
        asyncio.run(start_until_up("It", start))
    assert delays == []


def test_process_that_ends_is_started_again_each_time(delays: list[float], caplog: pytest.LogCaptureFixture) -> None:
    outcomes: list[Any] = [None, EngineError("not yet"), None, None]
    starts = 0

    async def run() -> None:
        done, ends = asyncio.Event(), iter(("SIGKILL", "stalled", "SIGSEGV"))

        async def end() -> str:
            if (reason := next(ends, None)) is None:
                done.set()
                await asyncio.Event().wait()
            return str(reason)

        async def start() -> None:
            nonlocal starts
            starts += 1
            if (outcome := outcomes.pop(0)) is not None:
                raise outcome

        task = asyncio.create_task(keep_running("It", end, start))
        await done.wait()
        task.cancel()

    asyncio.run(run())
    assert starts == 4
    assert delays == [1]
    assert "It ended (stalled); it is started again." in caplog.text
