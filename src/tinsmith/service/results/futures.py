"""Promises and those who wait for them. Results of training are also in the store; of sampling, only here.

Nothing polls: a waiter sleeps on the promise until it is kept, its hold is over, or the server closes. Samples are in
the log of completions as well, and in the ledger until their client knows that they ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tinsmith.service.results.completion_log import Completion, CompletionLog
from tinsmith.service.results.unfinished_samples import UnfinishedSamples
from tinsmith.service.storage.records import FutureResult

FETCHED_S = 300.0
"""A sample that was fetched stays this long: the response may have been lost on its way."""
STORED_S = 60.0
"""A training result stays in memory this long; after that it is read from the store."""


@dataclass(slots=True, kw_only=True)
class _Promise:
    owner: str
    kept: asyncio.Future[FutureResult]
    stored: bool
    fetched: bool = False
    timer: asyncio.TimerHandle | None = None
    """When it is forgotten."""


class Futures:
    """Open promises by request id, and kept ones for a while. Belongs to one event loop."""

    def __init__(self, hold_s: float, retention_s: float, unfinished: UnfinishedSamples) -> None:
        self._hold_s = hold_s
        self._retention_s = retention_s
        self._promises: dict[str, _Promise] = {}
        self._waiting: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._closing: asyncio.Future[None] = self._loop.create_future()
        self._unfinished = unfinished
        self.completions = CompletionLog(unfinished.remove)

    def open(self, request_id: str, owner: str, *, stored: bool) -> bool:
        """Promise a result; False if it is promised already. `stored`: the store will have it as well."""
        if request_id in self._promises:
            return False
        if not stored:
            self._unfinished.add(request_id)
        self._promises[request_id] = _Promise(owner=owner, kept=self._loop.create_future(), stored=stored)
        self._waiting[owner] += 1
        return True

    def resolve(self, request_id: str, answer: FutureResult) -> None:
        """The result, once; later ones are ignored. Wakes everyone who waits for it."""
        promise = self._promises.get(request_id)
        if promise is None or promise.kept.done():
            return
        promise.kept.set_result(answer)
        self._waiting[promise.owner] -= 1
        if not promise.stored:
            ended = answer.status == 200 and not answer.failed
            self.completions.add(Completion(request_id=request_id, size=len(answer.body) if ended else None))
        self._forget_in(STORED_S if promise.stored else self._retention_s, request_id, promise)

    def pending(self, owner: str) -> int:
        """How many of a tenant's requests have no result."""
        return self._waiting[owner]

    def knows(self, request_id: str, owner: str) -> bool:
        """Whether `wait` can be asked about it."""
        promise = self._promises.get(request_id)
        return promise is not None and promise.owner == owner

    async def wait(self, request_id: str) -> FutureResult | None:
        """The result; None if it is not there when the hold is over or the server closes."""
        promise = self._promises[request_id]
        if not promise.kept.done():
            await asyncio.wait({promise.kept, self._closing}, timeout=self._hold_s, return_when=asyncio.FIRST_COMPLETED)
            if not promise.kept.done():
                return None
        return promise.kept.result()

    def mark_fetched(self, request_id: str) -> None:
        """The whole result of a sample is on its way to the client; it stays a while, should it be lost there."""
        promise = self._promises.get(request_id)
        if promise is None or promise.stored or promise.fetched:
            return
        promise.fetched = True
        self.completions.acknowledge([request_id])
        self._forget_in(min(FETCHED_S, self._retention_s), request_id, promise)

    def acknowledge(self, request_ids: Iterable[str], owner: str) -> None:
        """The client has these samples: nothing of them needs to stay. One that is not done stays: nobody has it."""
        known = ((one, self._promises[one]) for one in request_ids if self.knows(one, owner))
        mine = [one for one, promise in known if promise.kept.done() and not promise.stored]
        self.completions.acknowledge(mine)
        for request_id in mine:
            self._forget(request_id)

    def drop_ended(self, over: Callable[[str], bool]) -> None:
        """What is forgotten here, of sampling sessions that are over, is told to nobody any more."""
        self.completions.drop_ended(over, lambda one: one not in self._promises)

    def restore_lost(self, wanted: Callable[[str], bool]) -> None:
        """Samples that an earlier process promised are lost: who waits for them hears so."""
        for request_id in self._unfinished.lost:
            if wanted(request_id):
                self.completions.add(Completion(request_id=request_id, size=None))
        self._unfinished.remove(one for one in self._unfinished.lost if not wanted(one))

    def acknowledge_lost(self, request_id: str) -> None:
        """The client heard that a lost sample is lost."""
        self.completions.acknowledge([request_id])

    def wake_waiters(self) -> None:
        """Send every waiter home; the client asks again."""
        self.completions.wake_waiters()
        if not self._closing.done():
            self._closing.set_result(None)

    def close(self) -> None:
        """After everything has ended."""
        self.wake_waiters()
        self._unfinished.close()

    def _forget_in(self, seconds: float, request_id: str, promise: _Promise) -> None:
        if promise.timer is not None:
            promise.timer.cancel()
        promise.timer = self._loop.call_later(seconds, self._forget, request_id)

    def _forget(self, request_id: str) -> None:
        promise = self._promises.pop(request_id, None)
        if promise is not None and promise.timer is not None:
            promise.timer.cancel()
