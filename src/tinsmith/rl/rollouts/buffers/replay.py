"""Selection of the next batch: the oldest unused one or, with replay, the one of highest priority.

A batch is not reused by the same weights that used it last: they learned nothing from it and would not now.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from tinsmith.rl.policy.base import request_seed
from tinsmith.rl.rollouts.buffers.base import Buffer
from tinsmith.rl.rollouts.producer import Batch
from tinsmith.settings import Needs, Settings

_ENABLED = Needs("enable", (True,))
_LIMITED = Needs("priority", ("linear_decay_limited",))


class ReplayConfig(Settings):
    """Reuse of batches."""

    enable: bool = False
    """By priority, in place of oldest first and once."""
    priority: Annotated[Literal["linear_decay", "linear_decay_limited"], _ENABLED] = "linear_decay"
    """`linear_decay`: the weights' version less `decay` for each use. `linear_decay_limited`: the same with some noise,
    and never after `limit` uses."""
    decay: Annotated[float, _ENABLED] = Field(default=2.0, ge=0)
    """What one use counts, in versions."""
    limit: Annotated[int, _ENABLED, _LIMITED] = Field(default=3, ge=1)
    """Uses of a batch, in `linear_decay_limited`."""
    sigma: Annotated[float, _ENABLED, _LIMITED] = Field(default=0.0, ge=0)
    """Deviation of the noise in `linear_decay_limited`, in versions."""
    cooldown: Annotated[float | None, _ENABLED] = Field(default=None, ge=0)
    """Seconds after a use until the batch may be used again; null is never."""
    size: Annotated[int, _ENABLED] = Field(default=64, ge=1)
    """Batches fresh; those of the lowest priority go first."""

    def value(self, version: int, uses: int, number: int, seed: int) -> float:
        """The priority of batch `number`, by weights of `version`, used so often; -inf: not again."""
        plain = version - self.decay * uses
        if self.priority == "linear_decay":
            return plain
        if uses >= self.limit:
            return float("-inf")
        noise = np.random.default_rng(request_seed(seed, number, uses)).normal() if self.sigma else 0.0
        return plain + self.sigma * float(noise)


class BufferSettings(Settings):
    """Settings of every buffer."""

    capacity: int = Field(default=16, ge=1)
    """Batches that may wait for training before sampling pauses; in every sync.style but `fixed`."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Drop groups sampled by weights more than this many updates old; null keeps all. `buffer/dropped_groups` counts
    the dropped groups."""
    replay: ReplayConfig = ReplayConfig()


class BatchUse(Settings):
    """Uses of a batch."""

    count: int = 0
    """Times it was trained on."""
    rests_until: float = 0.0
    """Seconds since 1970 before which it is not used again."""
    version: int = -1
    """Of the weights that trained on it last."""


class SelectorState(Settings):
    """State of a BatchSelector."""

    next: int = 1
    """The oldest batch not yet used, without replay."""
    uses: dict[int, BatchUse] = Field(default_factory=dict)
    """By number, where batches may be used again; those left out unused are among them."""


class BatchSelector:
    """Selects batches of a buffer for training."""

    def __init__(
        self, buffer: Buffer, config: BufferSettings, seed: int, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` tells seconds since 1970."""
        self._buffer, self._config, self._seed, self._clock = buffer, config, seed, clock
        self._next = 1
        self._uses: dict[int, BatchUse] = {}
        self._versions: dict[int, int] = {}
        self._done: set[int] = set()
        self._dropped = 0

    @property
    def taken(self) -> int:
        """Batches taken so far."""
        return len(self._uses) if self._config.replay.enable else self._next - 1

    @property
    def reuses(self) -> bool:
        """Whether batches are reused, so that there is always one."""
        return self._config.replay.enable and self._config.replay.cooldown is not None

    @property
    def done(self) -> frozenset[int]:
        """Numbers of batches that will not be used again."""
        return frozenset(self._done)

    @property
    def state(self) -> SelectorState:
        """What a run that goes on must know."""
        return SelectorState(next=self._next, uses=dict(self._uses))

    def restore(self, state: SelectorState) -> None:
        """As it was."""
        self._next, self._uses = state.next, dict(state.uses)

    async def take(self, version: int, *, again: bool = False) -> Batch | None:
        """What weights of `version` train on next; None if there is nothing yet.

        `again`: nothing else will come, so a batch that these weights were trained on already may do.
        """
        while True:
            batch = await (self._best(version, again) if self._config.replay.enable else self._oldest())
            if batch is None:
                return None
            fresh = tuple(group for group in batch.groups if self._fresh(version - group.version))
            self._dropped += len(batch.groups) - len(fresh)
            if not fresh:  # and it grows no younger
                self._done.add(batch.step)
                continue
            numbers = dict(batch.numbers)
            if self._config.max_staleness is not None:
                numbers["buffer/dropped_groups"] = float(self._dropped)
                self._dropped = 0
            if self._config.replay.enable:
                numbers["buffer/uses"] = float(self._uses[batch.step].count)
            return replace(batch, groups=fresh, numbers=numbers)

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

    async def _best(self, version: int, again: bool) -> Batch | None:
        replay, now = self._config.replay, self._clock()
        values: dict[int, float] = {}
        for number in sorted(set(await self._buffer.numbers()) - self._done):
            if number not in self._versions:
                self._versions[number] = min(group.version for group in (await self._buffer.get(number)).groups)
            use = self._uses.get(number, BatchUse())
            if use.count and replay.cooldown is None:  # by a process that was killed before it dropped what it had used
                self._done.add(number)
                continue
            values[number] = replay.value(self._versions[number], use.count, number, self._seed)
        for number in sorted(values, key=lambda number: values[number])[: max(0, len(values) - replay.size)]:
            self._uses.setdefault(number, BatchUse())
            self._done.add(number)
            del values[number]
        uses = {number: self._uses.get(number, BatchUse()) for number in values}
        ready = [number for number, use in uses.items() if use.rests_until <= now and values[number] > float("-inf")]
        ready = [number for number in ready if uses[number].version != version] or (ready if again else [])
        if not ready:
            return None
        best = max(ready, key=lambda number: (values[number], -number))
        count = uses[best].count + 1
        self._uses[best] = BatchUse(count=count, rests_until=now + (replay.cooldown or 0.0), version=version)
        if replay.cooldown is None or replay.value(0, count, best, self._seed) == float("-inf"):
            self._done.add(best)
        return await self._buffer.get(best)
