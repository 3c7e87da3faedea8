"""Completion log: the ended samples of each sampling session and clone, for clients that wait for many at once.

A log holds the entries that the client has not seen, after a cursor that only grows, also from one process to the next.
An entry is dropped when the client polls for later ones, or fetches the result. Samples that an earlier process lost
are entered as failed: the client fetches them, receives 410 and submits them again.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tinsmith.errors import BadRequest

CLONE_SEQS = 10**9
"""Clone c of a sampling session numbers its requests from c times this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A sample that ended; `size` is the number of bytes of its result, None if it failed."""

    request_id: str
    size: int | None


@dataclass(frozen=True, slots=True)
class Target:
    """The client that a log belongs to: a clone of a sampling session."""

    sampler_id: str
    clone: int


@dataclass(slots=True)
class _Log:
    entries: dict[str, tuple[int, Completion]] = field(default_factory=dict)
    """Request id -> (cursor, completion), in the order of the cursor."""
    waiters: set[asyncio.Future[None]] = field(default_factory=set)

    def wake(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)


class CompletionLog:
    """The logs of all targets. Belongs to one event loop."""

    def __init__(self, on_seen: Callable[[Iterable[str]], None]) -> None:
        self._on_seen = on_seen
        """Called with the request ids whose clients know that they ended."""
        # Cursors of a later process are larger: no process makes a million entries a second.
        self._cursor = time.time_ns() // 1000
        self._logs: defaultdict[Target, _Log] = defaultdict(_Log)
        self.closed = False

    def add(self, completion: Completion) -> None:
        """Enter an ended sample and wake the polls that wait for its log."""
        self._cursor += 1
        log = self._logs[target_of(completion.request_id)]
        log.entries.pop(completion.request_id, None)  # lost, submitted again, and ended now
        log.entries[completion.request_id] = (self._cursor, completion)
        log.wake()

    def drop_ended(self, has_ended: Callable[[str], bool], is_forgotten: Callable[[str], bool]) -> None:
        """Drop entries of ended sampling sessions whose results are forgotten."""
        for target, log in list(self._logs.items()):
            if has_ended(target.sampler_id):
                self.acknowledge([request_id for request_id in log.entries if is_forgotten(request_id)])

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """Drop the entries of requests whose client knows that they ended."""
        ids = list(request_ids)
        for request_id in ids:
            target = target_of(request_id)
            if target in self._logs:
                self._logs[target].entries.pop(request_id, None)
                self._drop_if_empty(target)
        self._on_seen(ids)

    async def wait_after(self, target: Target, cursor: int, hold_s: float) -> tuple[list[Completion], int]:
        """Return (the completions after `cursor`, the cursor after them); wait at most `hold_s` for the first."""
        log = self._logs[target]
        try:
            entries = self._after(log, cursor)
            if not entries and hold_s > 0 and not self.closed:
                await _wait_for_entry(log, hold_s)
                entries = self._after(log, cursor)
        finally:
            self._drop_if_empty(target)
        return ([completion for _, completion in entries], entries[-1][0]) if entries else ([], cursor)

    def wake_waiters(self) -> None:
        """Answer every poll now."""
        self.closed = True
        for log in self._logs.values():
            log.wake()

    def _after(self, log: _Log, cursor: int) -> list[tuple[int, Completion]]:
        """The entries after the cursor; the others, which the client has seen, are dropped."""
        if cursor > self._cursor:  # the clock went back between two processes
            cursor = 0
        seen = [request_id for request_id, (position, _) in log.entries.items() if position <= cursor]
        for request_id in seen:
            del log.entries[request_id]
        self._on_seen(seen)
        return list(log.entries.values())

    def _drop_if_empty(self, target: Target) -> None:
        """Drop a log without entries and polls: clients can name any number of targets."""
        log = self._logs.get(target)
        if log is not None and not log.entries and not log.waiters:
            del self._logs[target]


async def _wait_for_entry(log: _Log, hold_s: float) -> None:
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
    """The target whose log a sample belongs to. Raises BadRequest for the id of anything else."""
    sampler_id, _, number = request_id.rpartition(":")
    if not number.isdecimal():
        raise BadRequest(f"{request_id} is not the id of a sampling request.", "Poll with the request_id of a promise.")
    return Target(sampler_id, int(number) // CLONE_SEQS)
