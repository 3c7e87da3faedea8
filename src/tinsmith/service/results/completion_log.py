"""What ended, for a client that waits for many samples at once: a log for each sampling session and clone.

A log holds what the client has not seen yet, behind a cursor that only grows, also from one process to the next. An
entry goes when the client asks for what comes after it, or fetches the result it announces. Samples that an earlier
process left behind are in it as failed: the client fetches them, hears 410, and submits them again.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tinsmith.errors import BadRequest

CLONE = 10**9
"""Clone c of a sampling session counts its seq_ids from c times this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A sample that ended; `size` is its result's bytes, None if it failed."""

    request_id: str
    size: int | None


@dataclass(frozen=True, slots=True)
class Target:
    """Whose log: one sampling session, and one of the clients that share it."""

    sampler_id: str
    clone: int


@dataclass(slots=True)
class _Log:
    entries: dict[str, tuple[int, Completion]] = field(default_factory=dict)
    """By request id, in the order of the cursor."""
    waiters: set[asyncio.Future[None]] = field(default_factory=set)

    def wake(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)


class CompletionLog:
    """All logs. Belongs to one event loop."""

    def __init__(self, told: Callable[[Iterable[str]], None]) -> None:
        self._told = told
        """Hears which ends their clients know of."""
        # Cursors of a later process are larger: no process makes a million entries a second.
        self._cursor = time.time_ns() // 1000
        self._logs: defaultdict[Target, _Log] = defaultdict(_Log)
        self.closed = False

    def add(self, completion: Completion) -> None:
        """A sample ended; wakes who waits for its log."""
        self._cursor += 1
        log = self._logs[target_of(completion.request_id)]
        log.entries.pop(completion.request_id, None)  # it was lost, submitted again, and ended now
        log.entries[completion.request_id] = (self._cursor, completion)
        log.wake()

    def drop_ended(self, over: Callable[[str], bool], forgotten: Callable[[str], bool]) -> None:
        """Nobody is told any more of samples whose session is over and whose results are forgotten."""
        for target, log in list(self._logs.items()):
            if over(target.sampler_id):
                self.acknowledge([one for one in log.entries if forgotten(one)])

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """The client knows that they ended: it asked for the results."""
        ids = list(request_ids)
        for request_id in ids:
            target = target_of(request_id)
            if target in self._logs:
                self._logs[target].entries.pop(request_id, None)
                self._spare(target)
        self._told(ids)

    async def wait_after(self, target: Target, cursor: int, hold_s: float) -> tuple[list[Completion], int]:
        """What ended after `cursor`, and the cursor behind it; waits for something as long as `hold_s`."""
        log = self._logs[target]
        try:
            found = self._after(log, cursor)
            if not found and hold_s > 0 and not self.closed:
                await _growth(log, hold_s)
                found = self._after(log, cursor)
        finally:
            self._spare(target)
        return ([completion for _, completion in found], found[-1][0]) if found else ([], cursor)

    def wake_waiters(self) -> None:
        """Send every waiter home."""
        self.closed = True
        for log in self._logs.values():
            log.wake()

    def _after(self, log: _Log, cursor: int) -> list[tuple[int, Completion]]:
        """What the client has not seen; what it has is dropped."""
        if cursor > self._cursor:  # the clock went back between two processes
            cursor = 0
        known = [one for one, (place, _) in log.entries.items() if place <= cursor]
        for request_id in known:
            del log.entries[request_id]
        self._told(known)
        return list(log.entries.values())

    def _spare(self, target: Target) -> None:
        """A log with nothing in it, for which nobody waits, is not kept: clients name as many as they like."""
        log = self._logs.get(target)
        if log is not None and not log.entries and not log.waiters:
            del self._logs[target]


async def _growth(log: _Log, hold_s: float) -> None:
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    log.waiters.add(waiter)
    try:
        async with asyncio.timeout(hold_s):
            await waiter
    except TimeoutError:
        pass
    finally:
        log.waiters.discard(waiter)


def target_of(request_id: str) -> Target:
    """The log that a sample's end goes into. Raises BadRequest for an id that is no sample's."""
    sampler_id, _, number = request_id.rpartition(":")
    if not number.isdecimal():
        raise BadRequest(f"{request_id} is no sampling request.", "Poll with the request_id of a promise.")
    return Target(sampler_id, int(number) // CLONE)
