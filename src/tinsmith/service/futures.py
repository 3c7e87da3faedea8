"""Promises and those who wait for them. Results of training are also in the store; of sampling, only here.

Nothing polls: a waiter sleeps on the promise until it is kept, its hold is over, or the server closes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tinsmith.service.records import Answer

FETCHED_S = 300.0
"""A sample that was fetched stays this long: the response may have been lost on its way."""
STORED_S = 60.0
"""A training result stays in memory this long; after that it is read from the store."""


@dataclass(slots=True, kw_only=True)
class _Promise:
    owner: str
    kept: asyncio.Future[Answer]
    stored: bool
    fetched: bool = False


class Futures:
    """Open promises by request id, and kept ones for a while. Belongs to one event loop."""

    def __init__(self, hold_s: float, retention_s: float) -> None:
        self._hold_s = hold_s
        self._retention_s = retention_s
        self._promises: dict[str, _Promise] = {}
        self._loop = asyncio.get_running_loop()
        self._closing: asyncio.Future[None] = self._loop.create_future()

    def open(self, request_id: str, owner: str, *, stored: bool) -> bool:
        """Promise a result; False if it is promised already. `stored`: the store will have it as well."""
        if request_id in self._promises:
            return False
        self._promises[request_id] = _Promise(owner=owner, kept=self._loop.create_future(), stored=stored)
        return True

    def keep(self, request_id: str, answer: Answer) -> None:
        """The result, once; later ones are ignored. Wakes everyone who waits for it."""
        promise = self._promises.get(request_id)
        if promise is None or promise.kept.done():
            return
        promise.kept.set_result(answer)
        self._loop.call_later(STORED_S if promise.stored else self._retention_s, self._forget, request_id)

    def knows(self, request_id: str, owner: str) -> bool:
        """Whether `wait` can be asked about it."""
        promise = self._promises.get(request_id)
        return promise is not None and promise.owner == owner

    async def wait(self, request_id: str) -> Answer | None:
        """The result; None if it is not there when the hold is over or the server closes."""
        promise = self._promises[request_id]
        if not promise.kept.done():
            await asyncio.wait({promise.kept, self._closing}, timeout=self._hold_s, return_when=asyncio.FIRST_COMPLETED)
            if not promise.kept.done():
                return None
        if not promise.fetched and not promise.stored:
            promise.fetched = True
            self._loop.call_later(FETCHED_S, self._forget, request_id)
        return promise.kept.result()

    def close(self) -> None:
        """Send every waiter home; the client asks again."""
        if not self._closing.done():
            self._closing.set_result(None)

    def _forget(self, request_id: str) -> None:
        self._promises.pop(request_id, None)
