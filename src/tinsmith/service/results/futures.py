"""Futures: results that were promised to clients, and the polls that wait for them.

Results of training are also in the store; results of samples and of shadows are only here, in memory up to
MEMORY_BYTES and then on disk. A poll sleeps until the future is resolved, the hold time is over, or the server closes.
Samples also appear in the completion log, and in the file of unfinished samples until their client knows that they
ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tinsmith.service.results.completion_log import Completion, CompletionLog
from tinsmith.service.results.expiry import Expiry
from tinsmith.service.results.result_files import ResultFiles, ResultPlace
from tinsmith.service.results.unfinished_samples import UnfinishedSamples
from tinsmith.service.storage.records import FutureResult

log = logging.getLogger(__name__)

FETCHED_S = 300.0
"""Time that a fetched sample stays: the response may have been lost on its way."""
STORED_S = 60.0
"""Time that a training result which nobody fetches stays in memory; once fetched or later it is read from the store."""
MEMORY_BYTES = 64 << 20
"""Results in memory. When there are more, the oldest go to disk."""
RETRY_S = 5.0
"""Time between two attempts to write results to a failing disk."""


@dataclass(slots=True, kw_only=True)
class _Future:
    owner: str
    stored: bool
    logged: bool
    kept_s: float
    result: FutureResult | None = None
    place: ResultPlace | None = None
    """Where the body of the result is; None if it is in memory."""
    waiters: set[asyncio.Future[None]] | None = None
    """The polls that wait for the result."""
    fetched: bool = False


class Futures:
    """Open and recently resolved futures by request id. Belongs to one event loop."""

    def __init__(
        self,
        hold_s: float,
        retention_s: float,
        unfinished: UnfinishedSamples,
        on_fetched: Callable[[str], None] = lambda request_id: None,
        files: ResultFiles | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """`on_fetched` is called with the id of a request whose result is stored, when the result is fetched.

        Without `files`, all results stay in memory.
        """
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
        self._expiry = Expiry(self._forget, self._loop)
        self._files, self._memory_limit = files, memory_bytes
        self._in_memory: OrderedDict[str, None] = OrderedDict()
        """Requests whose results are in memory, the oldest first."""
        self.memory_bytes = 0
        """Size of these results."""
        self._spilling: asyncio.Task[None] | None = None
        self.completions = CompletionLog(self._forget_unfinished)

    @property
    def result_bytes(self) -> dict[str, int]:
        """Size of the results, by where they are."""
        return {"memory": self.memory_bytes, "disk": self._files.size_bytes if self._files is not None else 0}

    def open(self, request_id: str, owner: str, *, stored: bool, logged: bool = False) -> bool:
        """Promise a result. False if it is promised already.

        `stored`: the store will have the result too. `logged`: it appears in the completion log, as samples do.
        """
        if request_id in self._futures:
            return False
        if logged:
            self._unfinished.add(request_id)
        kept_s = STORED_S if stored else self._retention_s
        self._futures[request_id] = _Future(owner=owner, stored=stored, logged=logged, kept_s=kept_s)
        self._pending[owner] += 1
        return True

    def resolve(self, request_id: str, result: FutureResult) -> None:
        """Set the result and wake the polls that wait for it. Only the first result counts."""
        future = self._futures.get(request_id)
        if future is None or future.result is not None:
            return
        future.result = result
        self._in_memory[request_id] = None
        self.memory_bytes += len(result.body)
        _wake(future.waiters or ())
        future.waiters = None  # an empty set takes as much memory as a small result
        self._pending[future.owner] -= 1
        if future.logged:
            succeeded = result.status == 200 and not result.failed
            self.completions.add(Completion(request_id=request_id, size=len(result.body) if succeeded else None))
        self._expiry.start(request_id, future.kept_s)
        if self.memory_bytes > self._memory_limit and self._files is not None and self._spilling is None:
            self._spilling = asyncio.create_task(self._spill(self._files))

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
            future.waiters = set() if future.waiters is None else future.waiters
            await self._wait_in(future.waiters)
        if future.result is None or future.place is None or self._files is None:
            return future.result
        with self._files.held(future.place):
            return replace(future.result, body=await asyncio.to_thread(self._files.read, future.place))

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
        """The result is on its way to the client. That of a sample stays for FETCHED_S in case it is lost.

        A stored result leaves the memory: a poll that repeats this one reads it from the store.
        """
        future = self._futures.get(request_id)
        if future is None or not future.logged:
            self._on_fetched(request_id)
            if future is not None and future.stored and future.result is not None:
                self._forget(request_id)
            return
        if future.fetched:
            return
        future.fetched = True
        self.completions.acknowledge([request_id])
        self._expiry.start(request_id, min(FETCHED_S, self._retention_s))

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
            _wake(future.waiters or ())

    def close(self) -> None:
        """Close the files, once everything has ended."""
        self.wake_waiters()
        self._expiry.close()
        if self._spilling is not None:
            self._spilling.cancel()
        elif self._files is not None:
            self._files.close()
        self._unfinished.close()

    def _forget(self, request_id: str) -> None:
        self._expiry.stop(request_id)
        future = self._futures.pop(request_id, None)
        if future is None or future.result is None:
            return
        self._leave_memory(request_id, future.result)
        if future.place is not None and self._files is not None:
            self._files.remove(future.place)

    def _leave_memory(self, request_id: str, result: FutureResult) -> None:
        if request_id in self._in_memory:
            del self._in_memory[request_id]
            self.memory_bytes -= len(result.body)

    async def _spill(self, files: ResultFiles) -> None:
        """Move the oldest results to disk until the others fit in memory; forget those that the store has."""
        try:
            while self.memory_bytes > self._memory_limit:
                request_id = next(iter(self._in_memory))
                future = self._futures[request_id]
                if future.stored:
                    self._forget(request_id)
                    continue
                try:
                    await self._move_to_disk(request_id, future, files)
                except OSError as error:
                    log.warning("Results stay in memory, since the data folder cannot be written: %s", error)
                    await asyncio.sleep(RETRY_S)
        finally:
            self._spilling = None

    async def _move_to_disk(self, request_id: str, future: _Future, files: ResultFiles) -> None:
        assert future.result is not None
        place = files.reserve(len(future.result.body))
        try:
            await asyncio.to_thread(files.write, place, future.result.body)
        except OSError:
            files.remove(place)
            raise
        if self._futures.get(request_id) is not future:  # it was forgotten meanwhile
            files.remove(place)
            return
        self._leave_memory(request_id, future.result)
        future.result, future.place = replace(future.result, body=b""), place


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
