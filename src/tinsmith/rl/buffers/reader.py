"""Which batch a step trains on: the oldest not yet used; or, where batches are used again, that of highest priority."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from pydantic import Field

from tinsmith.rl.buffers.base import Buffer
from tinsmith.rl.buffers.replay import Waiting
from tinsmith.rl.rollouts import Batch
from tinsmith.settings import Settings


class Use(Settings):
    """What was done with a batch."""

    count: int = 0
    """Times it was trained on."""
    rests_until: float = 0.0
    """Seconds since 1970 before which it is not used again."""


class Reading(Settings):
    """Where the training side is."""

    next: int = 1
    """The oldest batch not yet used, without replay."""
    uses: dict[int, Use] = Field(default_factory=dict)
    """By number, of batches that may be used again."""


class Reader:
    """The training side of a buffer."""

    def __init__(self, buffer: Buffer, config: Waiting, seed: int, clock: Callable[[], float] = time.time) -> None:
        """`clock` tells seconds since 1970."""
        self._buffer, self._config, self._seed, self._clock = buffer, config, seed, clock
        self._next = 1
        self._uses: dict[int, Use] = {}
        self._versions: dict[int, int] = {}
        self._done: set[int] = set()
        self._dropped = 0

    @property
    def taken(self) -> int:
        """Batches that were looked at."""
        return len(self._uses) if self._config.replay.enable else self._next - 1

    @property
    def done(self) -> frozenset[int]:
        """Numbers of batches that will not be used again."""
        return frozenset(self._done)

    @property
    def state(self) -> Reading:
        """What a run that goes on must know."""
        return Reading(next=self._next, uses=dict(self._uses))

    def restore(self, state: Reading) -> None:
        """As it was."""
        self._next, self._uses = state.next, dict(state.uses)

    async def take(self, version: int) -> Batch | None:
        """What weights of `version` train on next; None if there is nothing yet."""
        while True:
            batch = await (self._best() if self._config.replay.enable else self._oldest())
            if batch is None:
                return None
            kept = tuple(group for group in batch.groups if self._fresh(version - group.version))
            self._dropped += len(batch.groups) - len(kept)
            if not kept:
                continue
            numbers = dict(batch.numbers)
            if self._config.max_staleness is not None:
                numbers["buffer/dropped_groups"] = float(self._dropped)
                self._dropped = 0
            if self._config.replay.enable:
                numbers["buffer/uses"] = float(self._uses[batch.step].count)
            return replace(batch, groups=kept, numbers=numbers)

    async def clear(self) -> None:
        """Drops what is done with; called when a run that goes on would not ask for it."""
        await self._buffer.drop(sorted(self._done))
        self._done.clear()

    def _fresh(self, age: int) -> bool:
        return self._config.max_staleness is None or age <= self._config.max_staleness

    async def _oldest(self) -> Batch | None:
        if self._next not in await self._buffer.numbers():
            return None
        self._next += 1
        self._done.add(self._next - 1)
        return await self._buffer.get(self._next - 1)

    async def _best(self) -> Batch | None:
        replay, now = self._config.replay, self._clock()
        values: dict[int, float] = {}
        for number in sorted(set(await self._buffer.numbers()) - self._done):
            if number not in self._versions:
                self._versions[number] = min(group.version for group in (await self._buffer.get(number)).groups)
            use = self._uses.get(number, Use())
            values[number] = replay.value(self._versions[number], use.count, number, self._seed)
        for number in sorted(values, key=lambda one: values[one])[: max(0, len(values) - replay.size)]:
            self._done.add(number)
            del values[number]
        ready = [one for one in values if self._uses.get(one, Use()).rests_until <= now and values[one] > float("-inf")]
        if not ready:
            return None
        best = max(ready, key=lambda one: (values[one], -one))
        count = self._uses.get(best, Use()).count + 1
        again = replay.cooldown is not None and replay.value(0, count, best, self._seed) > float("-inf")
        self._uses[best] = Use(count=count, rests_until=now + (replay.cooldown or 0.0))
        if not again:
            self._done.add(best)
        return await self._buffer.get(best)
