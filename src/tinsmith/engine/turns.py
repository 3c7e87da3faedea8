"""Training and sampling share one device by time.

Only one of the two computes at a moment; each asks for a turn before every micro-batch or token. Whoever has used less
time goes first, so a micro-batch of a second is followed by a second of tokens, if there are tokens to make. Who was
idle comes back with little credit: CREDIT seconds at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

Party = Literal["training", "sampling"]

CREDIT = 2.0
"""Seconds; about the longest single turn, so that a short-turned party can catch up with a long-turned one."""

_OTHER: dict[Party, Party] = {"training": "sampling", "sampling": "training"}


class Turns:
    """Of one engine, in one event loop; computing blocks the loop, so nothing needs a lock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._used: dict[Party, float] = {"training": 0.0, "sampling": 0.0}
        self._wanting: set[Party] = set()

    @asynccontextmanager
    async def of(self, party: Party) -> AsyncIterator[None]:
        """Wait for the party's turn; what is computed inside counts as its time."""
        other = _OTHER[party]
        self._used[party] = max(self._used[party], self._used[other] - CREDIT)
        self._wanting.add(party)
        try:
            await asyncio.sleep(0)  # messages come in, and the other party can ask too
            while other in self._wanting and self._used[other] < self._used[party]:  # noqa: ASYNC110 - it is runnable
                await asyncio.sleep(0)
        finally:
            self._wanting.discard(party)
        start = self._clock()
        try:
            yield
        finally:
            self._used[party] += self._clock() - start
