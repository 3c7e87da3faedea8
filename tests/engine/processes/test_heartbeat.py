"""Heartbeats: when a child counts as stalled, and what its end means."""

from __future__ import annotations

import asyncio
import signal
import time
from itertools import count
from types import SimpleNamespace

import pytest

from tinsmith.engine.process_end import process_end
from tinsmith.engine.processes import heartbeat
from tinsmith.engine.processes.heartbeat import Heartbeat, HeartbeatMonitor


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.01)


async def reason(patch: pytest.MonkeyPatch, beats: list[int], *, busy: bool) -> str | None:
    """Why a child stalls that sends these progress counters, one a tick; None if it does not within 30 ticks."""
    heartbeats, ticks = HeartbeatMonitor(), count()

    async def tick(seconds: float) -> None:
        if next(ticks) == 30:
            raise TimeoutError

    def is_busy() -> bool:
        if beats:
            heartbeats.beat(Heartbeat(beats.pop(0)))
        return busy

    patch.setattr(heartbeat, "asyncio", SimpleNamespace(sleep=tick))
    try:
        return (await heartbeats.stalled(0.1, 0.15, is_busy)).text
    except TimeoutError:
        return None


@pytest.mark.parametrize(
    ("beats", "busy", "expected"),
    [
        ([], False, "stalled: no heartbeat for 0.15 s"),
        ([], True, "stalled: no progress for 0.1 s"),
        ([7] * 100, True, "stalled: no progress for 0.1 s"),
        ([7] * 100, False, None),
        (list(range(100)), True, None),
    ],
)
def test_child_stalls_without_heartbeat_or_progress(
    beats: list[int], busy: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails without the comparison of either limit in `HeartbeatMonitor.stalled`."""
    found_reason = asyncio.run(reason(monkeypatch, beats, busy=busy))
    assert (found_reason or "None").startswith(str(expected))


def test_pause_of_the_parent_is_one_tick() -> None:
    """A parent that could not run for a second must not kill its engine. Fails if ages are differences of a clock."""

    async def main() -> None:
        heartbeats = HeartbeatMonitor()
        stalled = asyncio.create_task(heartbeats.stalled(0.5, 0.5, lambda: True))
        await asyncio.sleep(0.02)
        time.sleep(1.0)  # noqa: ASYNC251 - the loop stands still
        await asyncio.sleep(0.02)
        assert not stalled.done()
        assert heartbeats._silence.seconds < 0.2
        stalled.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "memory_ran_out", "text", "from_outside"),
    [
        (-signal.SIGKILL, True, "SIGKILL: the system killed it, most likely because memory ran out", False),
        (-signal.SIGKILL, False, "SIGKILL: someone killed it", True),
        (-signal.SIGTERM, False, "SIGTERM: someone ended it", True),
        (-signal.SIGFPE, False, "SIGFPE: an arithmetic fault", False),
        (-signal.SIGSEGV, True, "SIGSEGV: a memory fault", False),
        (-40, False, "signal 40", False),
        (1, False, "exit status 1", False),
        (None, False, "its connection closed", False),
    ],
)
def test_end_of_a_process_names_its_signal(
    code: int | None, memory_ran_out: bool, text: str, from_outside: bool
) -> None:
    end = process_end(code, memory_ran_out=memory_ran_out)
    assert end.text.startswith(text)
    assert end.from_outside is from_outside
