"""Futures: results that were promised to clients, and the polls that wait for them.

Results of training are also in the store; results of samples and of shadows are only here. A poll sleeps until the
future is resolved, the hold time is over, or the server closes. Samples also appear in the completion log, and in the
file of unfinished samples until their client knows that they ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tinsmith.service.results.completion_log import Completion, CompletionLog
from tinsmith.service.results.unfinished_samples import UnfinishedSamples
from tinsmith.service.storage.records import FutureResult

FETCHED_S = 300.0
"""Time that a fetched sample stays: the response may have been lost on its way."""
STORED_S = 60.0
"""Time that a training result stays in memory; later it is read from the store."""


@dataclass(slots=True, kw_only=True)
class _Future:
    owner: str
    logged: bool
    kept_s: float
    result: FutureResult | None = None
    waiters: set[asyncio.Future[None]] = field(default_factory=set)
    """The polls that wait for the result."""
    fetched: bool = False
    expiry: asyncio.TimerHandle | None = None


class Futures:
    """Open and recently resolved futures by request id. Belongs to one event loop."""

    def __init__(
        self,
        hold_s: float,
        retention_s: float,
        unfinished: UnfinishedSamples,
        on_fetched: Callable[[str], None] = lambda request_id: None,
    ) -> None:
        """`on_fetched` is called with the id of a request whose result is stored, when the result is fetched."""
        self._hold_s = hold_s
        self._retention_s = retention_s
        self._futures: dict[str, _Future] = {}
        self._pending: Counter[str] = Counter()
        """Futures without a result, by owner."""
        self._loop = asyncio.get_running_loop()
        self._holding: set[asyncio.Future[None]] = set()
        """Polls that wait for the end of the hold time only."""
        self._is_closing = False
        self._unfinished = unfinished
        self._on_fetched = on_fetched
        self.completions = CompletionLog(self._forget_unfinished)

    def open(self, request_id: str, owner: str, *, stored: bool, logged: bool = False) -> bool:
        """Promise a result. False if it is promised already.

        `stored`: the store will have the result too. `logged`: it appears in the completion log, as samples do.
        """
        if request_id in self._futures:
            return False
        if logged:
            self._unfinished.add(request_id)
        kept_s = STORED_S if stored else self._retention_s
        self._futures[request_id] = _Future(owner=owner, logged=logged, kept_s=kept_s)
        self._pending[owner] += 1
        return True

    def resolve(self, request_id: str, result: FutureResult) -> None:
        """Set the result and wake the polls that wait for it. Only the first result counts."""
        future = self._futures.get(request_id)
        if future is None or future.result is not None:
            return
        future.result = result
        _wake(future.waiters)
        self._pending[future.owner] -= 1
        if future.logged:
            succeeded = result.status == 200 and not result.failed
            self.completions.add(Completion(request_id=request_id, size=len(result.body) if succeeded else None))
        self._forget_in(future.kept_s, request_id, future)

    def pending(self, owner: str) -> int:
        """Number of the owner's requests without a result."""
        return self._pending[owner]

    def knows(self, request_id: str, owner: str) -> bool:
        """Whether `wait` accepts this request of this owner."""
        future = self._futures.get(request_id)
        return future is not None and future.owner == owner

    async def wait(self, request_id: str) -> FutureResult | None:
        """The result; None if the hold time is over, or the server closes, before there is one."""
        future = self._futures[request_id]
        if future.result is None:
            await self._wait_in(future.waiters)
        return future.result

    async def hold(self) -> None:
        """Wait for the hold time, or until the server closes."""
        await self._wait_in(self._holding)

    async def _wait_in(self, waiters: set[asyncio.Future[None]]) -> None:
        """Wait until the waiters are woken, for the hold time at most.

        Each poll has a future of its own: the callbacks of one that thousands share are searched whenever a poll ends.
        """
        if self._is_closing:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        waiters.add(waiter)
        timer = self._loop.call_later(self._hold_s, _wake, (waiter,))
        try:
            await waiter
        finally:
            timer.cancel()
            waiters.discard(waiter)

    def mark_fetched(self, request_id: str) -> None:
        """The result is on its way to the client. That of a sample stays for FETCHED_S in case it is lost."""
        future = self._futures.get(request_id)
        if future is None or not future.logged:
            self._on_fetched(request_id)
            return
        if future.fetched:
            return
        future.fetched = True
        self.completions.acknowledge([request_id])
        self._forget_in(min(FETCHED_S, self._retention_s), request_id, future)

    def acknowledge(self, request_ids: Iterable[str], owner: str) -> None:
        """Forget samples that the client has received; unfinished ids are ignored."""
        owned = ((request_id, self._futures[request_id]) for request_id in request_ids if self.knows(request_id, owner))
        received = [request_id for request_id, future in owned if future.result is not None and future.logged]
        self.completions.acknowledge(received)
        for request_id in received:
            self._forget(request_id)

    def drop_ended(self, has_ended: Callable[[str], bool]) -> None:
        """Drop log entries of ended sampling sessions whose results are forgotten."""
        self.completions.drop_ended(has_ended, lambda request_id: request_id not in self._futures)

    def restore_lost(self, is_wanted: Callable[[str], bool]) -> None:
        """Announce the samples that an earlier process lost, if they are wanted; forget the others."""
        for request_id in self._unfinished.lost:
            if is_wanted(request_id):
                self.completions.add(Completion(request_id=request_id, size=None))
        self._unfinished.remove(request_id for request_id in self._unfinished.lost if not is_wanted(request_id))

    def acknowledge_lost(self, request_id: str) -> None:
        """The client knows that a sample is lost."""
        self.completions.acknowledge([request_id])

    def _forget_unfinished(self, request_ids: Iterable[str]) -> None:
        """Their clients know that they ended; one that was submitted again meanwhile has not ended."""
        ended = (each for each in request_ids if each not in self._futures or self._futures[each].result is not None)
        self._unfinished.remove(ended)

    def wake_waiters(self) -> None:
        """Answer every poll now; the clients poll again."""
        self.completions.wake_waiters()
        self._is_closing = True
        _wake(self._holding)
        for future in self._futures.values():
            _wake(future.waiters)

    def close(self) -> None:
        """Close the file of unfinished samples, once everything has ended."""
        self.wake_waiters()
        self._unfinished.close()

    def _forget_in(self, seconds: float, request_id: str, future: _Future) -> None:
        if future.expiry is not None:
            future.expiry.cancel()
        future.expiry = self._loop.call_later(seconds, self._forget, request_id)

    def _forget(self, request_id: str) -> None:
        future = self._futures.pop(request_id, None)
        if future is not None and future.expiry is not None:
            future.expiry.cancel()


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
