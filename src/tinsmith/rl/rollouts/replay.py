"""Select the next batch to train on: the oldest unused batch or, with replay, the batch of highest priority.

A batch is not used twice in a row by the same version of the weights: if the version did not change, the batch had no
training signal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from tinsmith.rl.policy.sampling import request_seed
from tinsmith.rl.rollouts.batch import Batch
from tinsmith.rl.rollouts.store import Store
from tinsmith.settings import Needs, Settings

_ENABLED = Needs("enable", (True,))
_LIMITED = Needs("priority", ("linear_decay_limited",))


class ReplayConfig(Settings):
    """Train on batches more than once."""

    enable: bool = False
    """Select batches by priority and reuse them; otherwise each batch is used once, oldest first."""
    priority: Annotated[Literal["linear_decay", "linear_decay_limited"], _ENABLED] = "linear_decay"
    """`linear_decay`: version of the batch minus `decay` per use. `linear_decay_limited`: the same plus noise, and at
    most `limit` uses."""
    decay: Annotated[float, _ENABLED] = Field(default=2.0, ge=0)
    """Priority lost per use, in versions."""
    limit: Annotated[int, _ENABLED, _LIMITED] = Field(default=3, ge=1)
    """Maximum number of uses of a batch, for `linear_decay_limited`."""
    sigma: Annotated[float, _ENABLED, _LIMITED] = Field(default=0.0, ge=0)
    """Standard deviation of the noise, in versions, for `linear_decay_limited`."""
    cooldown: Annotated[float | None, _ENABLED] = Field(default=None, ge=0)
    """Seconds after a use before the batch may be used again; null: each batch is used once."""
    size: Annotated[int, _ENABLED] = Field(default=64, ge=1)
    """Maximum number of batches to keep; batches of the lowest priority are dropped first."""

    def priority_of(self, number: int, *, version: int, uses: int, seed: int) -> float:
        """Priority of batch `number`, sampled by weights of `version` and used `uses` times; -inf: do not use it."""
        decayed = version - self.decay * uses
        if self.priority == "linear_decay":
            return decayed
        if uses >= self.limit:
            return float("-inf")
        noise = np.random.default_rng(request_seed(seed, number, uses)).normal() if self.sigma else 0.0
        return decayed + self.sigma * float(noise)


class BufferSettings(Settings):
    """Settings of all buffers."""

    capacity: int = Field(default=16, ge=1)
    """Number of batches that may wait for training before sampling pauses; not used with sync.style: fixed."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Drop groups sampled more than this many updates ago; null keeps all. The metric `buffer/dropped_groups` counts
    them."""
    replay: ReplayConfig = ReplayConfig()


class BatchUse(Settings):
    """How often and when a batch was trained on."""

    count: int = 0
    """Number of uses."""
    rests_until: float = 0.0
    """Unix time in seconds before which the batch is not used again."""
    version: int = -1
    """Version of the weights at the last use; -1 before the first."""


class SelectorState(Settings):
    """State of a BatchSelector."""

    next: int = 1
    """Without replay: number of the oldest unused batch."""
    uses: dict[int, BatchUse] = Field(default_factory=dict)
    """With replay: uses by batch number, including batches dropped without a use."""


class BatchSelector:
    """Selects the stored batches to train on."""

    def __init__(self, store: Store, config: BufferSettings, seed: int, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns the Unix time in seconds."""
        self._store, self._config, self._seed, self._clock = store, config, seed, clock
        self._next = 1
        self._uses: dict[int, BatchUse] = {}
        self._versions: dict[int, int] = {}
        self._done: set[int] = set()
        self._dropped = 0

    @property
    def taken(self) -> int:
        """Number of different batches taken so far."""
        return len(self._uses) if self._config.replay.enable else self._next - 1

    @property
    def replays(self) -> bool:
        """Whether batches are selected by priority, in place of their order."""
        return self._config.replay.enable

    @property
    def keeps_order(self) -> bool:
        """Whether every batch is taken once, in order, with all its groups."""
        return not self._config.replay.enable and self._config.max_staleness is None

    @property
    def reuses(self) -> bool:
        """Whether batches may be used more than once."""
        return self._config.replay.enable and self._config.replay.cooldown is not None

    @property
    def done(self) -> frozenset[int]:
        """Numbers of the batches that will not be used again."""
        return frozenset(self._done)

    @property
    def state(self) -> SelectorState:
        """State for a checkpoint."""
        return SelectorState(next=self._next, uses=dict(self._uses))

    def restore(self, state: SelectorState) -> None:
        """Continue from the state of a checkpoint."""
        self._next, self._uses = state.next, dict(state.uses)

    async def take(self, version: int, *, again: bool = False) -> Batch | None:
        """The next batch for weights of `version`; None if no batch is ready.

        `again` also allows batches last used by the same version; set it when no other batch will arrive.
        """
        while True:
            batch = await (self._best(version, again) if self._config.replay.enable else self._oldest())
            if batch is None:
                return None
            fresh = tuple(group for group in batch.groups if self._is_fresh(version - group.version))
            self._dropped += len(batch.groups) - len(fresh)
            if not fresh:  # versions only increase, so its groups stay too old
                self._done.add(batch.step)
                continue
            numbers = dict(batch.numbers)
            if self._config.max_staleness is not None:
                numbers["buffer/dropped_groups"] = float(self._dropped)
                self._dropped = 0
            if self._config.replay.enable:
                numbers["buffer/uses"] = float(self._uses[batch.step].count)
            return replace(batch, groups=fresh, numbers=numbers)

    async def clear(self, numbers: Collection[int] | None = None) -> None:
        """Delete batches in `done`, all or those of `numbers`, from the store, once no checkpoint needs them."""
        used = sorted(self._done if numbers is None else numbers)
        await self._store.drop(used)
        self._done.difference_update(used)

    def _is_fresh(self, age: int) -> bool:
        return self._config.max_staleness is None or age <= self._config.max_staleness

    async def _oldest(self) -> Batch | None:
        if self._next not in await self._store.numbers():
            return None
        self._next += 1
        self._done.add(self._next - 1)
        return await self._store.get(self._next - 1)

    async def _best(self, version: int, again: bool) -> Batch | None:
        replay, now = self._config.replay, self._clock()
        priorities: dict[int, float] = {}
        for number in sorted(set(await self._store.numbers()) - self._done):
            if number not in self._versions:
                self._versions[number] = min(group.version for group in (await self._store.get(number)).groups)
            use = self._uses.get(number, BatchUse())
            if use.count and replay.cooldown is None:  # the process was killed before it deleted this used batch
                self._done.add(number)
                continue
            priorities[number] = replay.priority_of(
                number, version=self._versions[number], uses=use.count, seed=self._seed
            )
        excess = max(0, len(priorities) - replay.size)
        for number in sorted(priorities, key=lambda number: priorities[number])[:excess]:
            self._uses.setdefault(number, BatchUse())
            self._done.add(number)
            del priorities[number]
        uses = {number: self._uses.get(number, BatchUse()) for number in priorities}
        ready = [
            number for number, use in uses.items() if use.rests_until <= now and priorities[number] > float("-inf")
        ]
        ready = [number for number in ready if uses[number].version != version] or (ready if again else [])
        if not ready:
            return None
        best = max(ready, key=lambda number: (priorities[number], -number))
        count = uses[best].count + 1
        self._uses[best] = BatchUse(count=count, rests_until=now + (replay.cooldown or 0.0), version=version)
        if replay.cooldown is None or replay.priority_of(best, version=0, uses=count, seed=self._seed) == float("-inf"):
            self._done.add(best)
        return await self._store.get(best)
