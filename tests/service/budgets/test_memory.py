"""Memory that runs short: engines give back their caches."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from tests.service.support.inprocess import Factory, api, until
from tinsmith.service.budgets import memory
from tinsmith.service.budgets.memory import MemoryMonitor, short_below


def test_a_share_of_the_memory_at_most_a_gibibyte_is_kept_free() -> None:
    assert short_below(8 << 30) == 256 << 20
    assert short_below(512 << 30) == 1 << 30


def test_caches_are_released_while_memory_is_short(caplog: pytest.LogCaptureFixture) -> None:
    free = [10 << 40, 1000, 5000]
    released: list[int] = []

    async def release() -> None:
        released.append(len(free))

    async def main() -> None:
        monitor = MemoryMonitor(release, lambda: free.pop(0))
        assert not await monitor.check()
        assert not released
        assert await monitor.check()

    asyncio.run(main())
    assert len(released) == 1
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line == "Only 1.0 kB of memory are free; the engines gave back 4.0 kB of their caches."


def test_running_service_watches_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without the task of the monitor in `_running`."""
    monkeypatch.setattr(memory, "short_below", lambda physical: 1 << 62)
    monkeypatch.setattr(memory, "PAUSE_S", 0.01)

    async def main() -> None:
        start, calls = Factory(), set[str]()
        start.hook = lambda call, _: calls.add(call)
        async with api(tmp_path, start):
            await until(lambda: "release_memory" in calls)

    asyncio.run(main())
