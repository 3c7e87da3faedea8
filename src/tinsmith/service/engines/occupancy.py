"""Who uses an engine: many requests side by side, or one by itself that may be what ends engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Stay:
    """A request's time in the engine."""

    alone: bool
    """Whether nothing else has been in the engine since it began."""


class Occupancy:
    """Requests inside one engine. Belongs to one event loop."""

    def __init__(self) -> None:
        self._inside: set[Stay] = set()
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._reservation = asyncio.Lock()

    @asynccontextmanager
    async def share(self) -> AsyncIterator[Stay]:
        """Be inside beside others. Waits while one is inside by itself."""
        while not self._open.is_set():  # it may close again before a waiter runs
            await self._open.wait()
        stay = Stay(alone=not self._inside)
        for other in self._inside:
            other.alone = False
        self._inside.add(stay)
        self._empty.clear()
        try:
            yield stay
        finally:
            self._inside.discard(stay)
            if not self._inside:
                self._empty.set()

    @asynccontextmanager
    async def reserve(self) -> AsyncIterator[Stay]:
        """Be inside by oneself: waits until all others have left, and they wait until the end."""
        async with self._reservation:
            self._open.clear()
            try:
                await self._empty.wait()
                yield Stay(alone=True)
            finally:
                self._open.set()
