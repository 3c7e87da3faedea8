"""Free memory of the machine: engines give back what they keep for speed only, before the kernel has to kill one.

Before an engine is loaded, the others do the same in any case. Memory of a GPU is not watched: its engine takes it as a
whole.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from tinsmith.engine.model.memory import free_bytes
from tinsmith.plurals import display_bytes

log = logging.getLogger(__name__)

SHARE, MAX_BYTES = 32, 1 << 30
"""Memory is short while less than 1 / SHARE of the machine's is free, or less than MAX_BYTES if that is less."""
CHECK_S = 5.0
PAUSE_S = 60.0
"""Time after a release until the next one: an engine that needs its caches again must not lose them all the time."""


def short_below(physical_bytes: int) -> int:
    """Free bytes below which the memory of a machine is short."""
    return min(physical_bytes // SHARE, MAX_BYTES)


class MemoryMonitor:
    """Calls `release` while memory is short."""

    def __init__(self, release: Callable[[], Awaitable[None]], measure: Callable[[], int] = free_bytes) -> None:
        self._release, self._measure = release, measure
        self._limit = short_below(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    async def run(self) -> None:
        """Forever: look, and release."""
        while True:
            was_short = await self.check()
            await asyncio.sleep(PAUSE_S if was_short else CHECK_S)

    async def check(self) -> bool:
        """Release if memory is short. Returns whether it was."""
        free = self._measure()
        if free >= self._limit:
            return False
        await self._release()
        freed = display_bytes(max(0, self._measure() - free))
        log.warning("Only %s of memory are free; the engines gave back %s of their caches.", display_bytes(free), freed)
        return True
