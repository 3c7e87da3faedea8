"""Training and sampling share one device by time.

Only one of the two computes at a moment; each asks for a turn before every micro-batch or decoding step. Who has the
device keeps it for a spell, as long as it has something to do; then the other, if it waits, has a spell too. A policy
says how long spells are:

    latency      a spell of training is one micro-batch, and a spell of sampling is three times as long: a decoding
                 step waits for one micro-batch at most, and for few of them
    throughput   a spell of training is two seconds, and a spell of sampling is as long: requests gather meanwhile, so
                 passes and decoding steps are fuller

No turn is interrupted, so a spell is never shorter than one turn; so neither party starves, whatever the other does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

Party = Literal["training", "sampling"]
Sharing = Literal["latency", "throughput"]

ROUNDS = 4
"""Of the event loop before each turn: a message that came becomes a task, that a request, and this asks for a turn.
With fewer, a request would wait for several turns before anyone knows of it; each takes 20 microseconds."""
_OTHER: dict[Party, Party] = {"training": "sampling", "sampling": "training"}


@dataclass(frozen=True, slots=True)
class Policy:
    """How long spells are while both parties have something to do."""

    stretch: float
    """Seconds of a spell of training; at least one micro-batch."""
    weight: float
    """A spell of sampling is so many times as long as the spell of training before it; at least one step."""
    share: float = 1.0
    """Of `pass_tokens` in a micro-batch: smaller ones hand the device over sooner."""


POLICIES: Mapping[Sharing, Policy] = {
    "latency": Policy(stretch=0.0, weight=3.0, share=1 / 2),
    "throughput": Policy(stretch=2.0, weight=1.0),
}


class Turns:
    """Of one engine, in one event loop; computing blocks the loop, so nothing needs a lock."""

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.perf_counter) -> None:
        self._policy, self._clock = policy, clock
        self._holder: Party = "training"
        self._spent = self._due = self._last = 0.0
        """Seconds: of the holder's spell so far, until the other may have one, and of the last turn."""
        self._wanting: set[Party] = set()

    @asynccontextmanager
    async def of(self, party: Party) -> AsyncIterator[None]:
        """Wait for the party's turn; what is computed inside counts as its time."""
        other = _OTHER[party]
        self._wanting.add(party)
        try:
            for _ in range(ROUNDS):
                await asyncio.sleep(0)
            while other in self._wanting and self._next() is other:  # noqa: ASYNC110 - it is runnable
                await asyncio.sleep(0)
        finally:
            self._wanting.discard(party)
        if self._holder is not party:
            self._hand_over(party)
        start = self._clock()
        try:
            yield
        finally:
            self._last = self._clock() - start
            self._spent += self._last

    def _next(self) -> Party:
        """Whose turn it is if both want it."""
        return self._holder if self._spent < self._due else _OTHER[self._holder]

    def _hand_over(self, party: Party) -> None:
        """A new spell. What training used while nobody else wanted the device is not repaid."""
        contested = min(self._spent, self._policy.stretch + self._last)
        self._due = self._policy.stretch if party == "training" else self._policy.weight * contested
        self._holder, self._spent = party, 0.0
