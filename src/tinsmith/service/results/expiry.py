"""Ids that end after a time: one timer for all of them.

A timer for each would keep the context of the request in which it began until then, and 12,000 samples of five minutes
would be 100,000 objects for each garbage collection.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

SLACK_S = 1.0
"""Longest time by which an id ends late, at most a tenth of its own time: those that are due end together."""


class Expiry:
    """Calls `end` with each id when its time is over. Belongs to one event loop."""

    def __init__(self, end: Callable[[str], None], loop: asyncio.AbstractEventLoop) -> None:
        self._end, self._loop = end, loop
        self._queues: dict[float, OrderedDict[str, float]] = {}
        """Seconds -> when each id with this time ends, the next one first. There are few different times."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self, key: str, seconds: float) -> None:
        """Begin the time of an id, in place of an earlier one."""
        self.stop(key)
        end = self._loop.time() + seconds
        self._queues.setdefault(seconds, OrderedDict())[key] = end
        if self._timer is None or self._timer.when() > end + min(SLACK_S, seconds / 10):
            self._wait()

    def stop(self, key: str) -> None:
        """Forget an id, if it is there."""
        for queue in self._queues.values():
            queue.pop(key, None)

    def close(self) -> None:
        """End nothing any more."""
        self._queues.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        ends = [
            next(iter(queue.values())) + min(SLACK_S, seconds / 10) for seconds, queue in self._queues.items() if queue
        ]
        self._timer = self._loop.call_at(min(ends), self._sweep) if ends else None

    def _sweep(self) -> None:
        now = self._loop.time()
        for queue in self._queues.values():
            while queue and next(iter(queue.values())) <= now:
                self._end(queue.popitem(last=False)[0])
        self._wait()
