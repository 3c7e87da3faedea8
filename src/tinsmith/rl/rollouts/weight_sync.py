"""Weight synchronization: which weights sample which batch, and how the sampling side gets them.

Batches and steps count from 1; step t trains on batch t, and the weights of step n are the weights after n steps. With
interval i and offset o (the run's `staleness`), style `fixed` samples batch k with the weights of step
floor((k - 1 - o) / i) i, or of step 0 if that is negative, so every run of the same file samples the same batches. The
other styles take the newest published weights at certain times; each group records the version that sampled it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from pydantic import Field
from typing_extensions import override

from tinsmith.errors import TinsmithError
from tinsmith.plurals import counted
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.policy.trainer import Trainer
from tinsmith.rl.rollouts.coordination import CoordinationNotes, WeightRecord
from tinsmith.settings import Needs, Settings


class SyncConfig(Settings):
    """Synchronization of the weights that sample with the weights in training."""

    style: Literal["fixed", "on_publish", "on_demand", "live"] = "fixed"
    """`fixed`: each batch is sampled by the weights of a step known in advance. `on_publish`: every `interval` batches,
    wait for newly published weights. `on_demand`: every `interval` batches, ask training for its newest weights. In
    both, sampling continues with the weights it has while training waits for a batch. `live`: new weights are used at
    once, also by rollouts in flight."""
    interval: int = Field(default=1, ge=1)
    """Batches sampled by the same weights; in `live`, the default of `publish_every`."""
    publish_every: int | None = Field(default=None, ge=1)
    """Steps between two publications in `on_publish` and `live`; not set: `interval`."""
    method: Literal["memory", "checkpoint"] | None = None
    """How weights are published: `memory`, as an unnamed version, or `checkpoint`, as a sampler checkpoint that other
    processes can open. Not set: memory in one process, checkpoint in two."""
    keep: Annotated[int, Needs("method", unless=("memory",))] = Field(default=3, ge=1)
    """Published sampler checkpoints to keep; older ones are deleted."""
    timeout: float = Field(default=3600.0, gt=0)
    """Seconds to wait for newer weights, or for a batch of another process, before the run ends with an error."""
    in_flight: Annotated[int, Needs("style", ("live",))] = Field(default=2, ge=1)
    """In `live`: number of batches in flight at a time."""

    @property
    def publish_interval(self) -> int:
        """Steps between publications."""
        return self.publish_every or self.interval

    def weights_for(self, batch: int, offset: int) -> int:
        """Step whose weights sample `batch` in style fixed."""
        return max(0, (batch - 1 - offset) // self.interval * self.interval)

    def checkpoints_to_keep(self, offset: int) -> int:
        """Number of published checkpoints to keep. In style fixed, batches not yet sampled may need that many."""
        return max(self.keep, 2 - (-offset // self.interval)) if self.style == "fixed" else self.keep

    def refreshes_before(self, batch: int, previous: int, offset: int) -> bool:
        """Whether sampling requests newer weights before `batch`, in on_publish and on_demand.

        `previous`: the batch for which this process had weights before; others may sample those between.
        """
        place = batch - 1 - offset
        return place > 0 and place // self.interval > (previous - 1 - offset) // self.interval


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """Weights to sample from, with the step after which they were published."""

    step: int
    snapshot: Snapshot


class WeightSource(Protocol):
    """Weights as the sampling side sees them."""

    async def at(self, step: int) -> PublishedWeights:
        """Weights of `step`, or of the first later step that was published; waits for them."""
        ...

    async def newer(self, than: int) -> PublishedWeights:
        """The newest weights. Waits for weights newer than those of step `than`, unless training itself waits."""
        ...

    def newest(self) -> PublishedWeights:
        """The newest weights opened so far."""
        ...


OpenWeights = Callable[[WeightRecord], Awaitable[Snapshot]]
"""Opens published weights for sampling."""


class WeightSubscriber(WeightSource):
    """Weights that the training side publishes in the notes, opened for sampling."""

    def __init__(self, notes: CoordinationNotes, open_weights: OpenWeights, timeout: float, hint: str) -> None:
        """`timeout` in seconds; `hint` says what to do when it expires."""
        self._notes, self._open_weights, self._timeout, self._hint = notes, open_weights, timeout, hint
        self._newest: PublishedWeights | None = None
        self._opened: tuple[int, str] | None = None
        self._awaited_step: int | None = None

    @property
    def waiting(self) -> bool:
        """Whether sampling needs weights that are not published yet."""
        step = self._awaited_step
        return step is not None and all(record.step < step for record in self._notes.last_weights)

    @override
    async def at(self, step: int) -> PublishedWeights:
        """Raises TinsmithError after the timeout."""

        async def look() -> PublishedWeights | None:
            record = next((record for record in await self._notes.weights() if record.step >= step), None)
            return await self._open(record) if record else None

        self._awaited_step = step
        self._notes.changes.notify()
        try:
            return await self._until(look, f"No weights of step {step}")
        finally:
            self._awaited_step = None

    @override
    async def newer(self, than: int) -> PublishedWeights:
        """Raises TinsmithError after the timeout."""
        newest = await self.refresh()
        if newest is not None and newest.step > than:
            return newest
        await self._notes.want_weights(than)

        async def look() -> PublishedWeights | None:
            return None if await self._notes.wants_weights() else await self.refresh()

        return await self._until(look, f"No weights newer than those of step {than}")

    @override
    def newest(self) -> PublishedWeights:
        assert self._newest is not None
        return self._newest

    async def refresh(self) -> PublishedWeights | None:
        """Open the newest published weights; None if there are none yet."""
        weights = await self._notes.weights()
        return await self._open(weights[-1]) if weights else None

    async def _open(self, record: WeightRecord) -> PublishedWeights:
        if self._newest is None or self._opened != (record.version, record.path):
            self._newest = PublishedWeights(record.step, await self._open_weights(record))
            self._opened = (record.version, record.path)
        elif self._newest.step != record.step:
            self._newest = PublishedWeights(record.step, self._newest.snapshot)
        return self._newest

    async def _until(self, look: Callable[[], Awaitable[PublishedWeights | None]], error: str) -> PublishedWeights:
        end = time.monotonic() + self._timeout
        while True:
            seen = self._notes.changes.count
            if (weights := await look()) is not None:
                return weights
            if time.monotonic() > end:
                raise TinsmithError(f"{error} within {counted(self._timeout, 'second')}.", self._hint)
            await self._notes.wait(seen)


class WeightPublisher:
    """Publishes the weights of a policy in the notes."""

    def __init__(
        self,
        policy: Trainer,
        notes: CoordinationNotes,
        method: Literal["memory", "checkpoint"],
        keep: int,
        ttl_seconds: int | None,
    ) -> None:
        """`keep` and `ttl_seconds` apply to checkpoints."""
        self._policy, self._notes, self._method, self._ttl = policy, notes, method, ttl_seconds
        self._keep = keep if method == "checkpoint" else 1
        self._records: tuple[WeightRecord, ...] | None = None
        self._snapshot: Snapshot | None = None

    @property
    def started(self) -> bool:
        """Whether this process has published weights."""
        return self._records is not None

    @property
    def newest_step(self) -> int:
        """Step of the newest published weights; -1 if there are none."""
        return self._records[-1].step if self._records else -1

    async def publish(self, step: int) -> None:
        """Publish the current weights as those of `step`. Unchanged weights keep their checkpoint."""
        if self._records is None:  # an earlier process may have gone further than the state that this one resumes from
            self._records = tuple(record for record in await self._notes.weights() if record.step < step)
        previous, version = self._records, self._policy.version
        if previous and previous[-1].version == version:
            path = previous[-1].path
        else:
            path = await self._save(step)
        self._records = (*previous, WeightRecord(step=step, version=version, path=path))[-self._keep :]
        await self._notes.write_weights(self._records)
        for dropped in dict.fromkeys(record.path for record in previous):
            if dropped and dropped not in {record.path for record in self._records}:
                await self._policy.models.delete_checkpoint(dropped)

    async def open(self, record: WeightRecord) -> Snapshot:
        """Open published weights in this process."""
        if record.path:
            return await self._policy.models.open_checkpoint(record.path, record.version)
        assert self._snapshot is not None
        return self._snapshot

    async def _save(self, step: int) -> str:
        if self._method == "memory":
            self._snapshot = await self._policy.snapshot()
            return ""
        return await self._policy.save_for_sampling(f"sync-{step:06}", self._ttl)
