"""Weight synchronization: which weights sample which batch, how they are published, and how they are opened.

Batches and steps count from 1; step t trains on batch t, and the weights of step n are the weights after n steps. With
interval i and offset o (the run's `staleness`), style `fixed` samples batch k with the weights of step
floor((k - 1 - o) / i) i, or of step 0 if that is negative, so every run of the same file samples the same batches. The
other styles take the newest published weights at certain times; each group records the version that sampled it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from pydantic import Field

from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.policy.trainer import Trainer
from tinsmith.rl.rollouts.store import Store, WeightRecord
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


OpenWeights = Callable[[WeightRecord], Awaitable[Snapshot]]
"""Opens published weights for sampling."""


class WeightReader:
    """Opens the weights that training publishes. Unchanged weights keep their snapshot."""

    def __init__(self, open_weights: OpenWeights) -> None:
        self._open_weights, self._opening = open_weights, asyncio.Lock()
        self._opened: tuple[int, str] | None = None
        self._newest: Snapshot | None = None

    @property
    def newest(self) -> Snapshot:
        """The snapshot that was opened last."""
        assert self._newest is not None
        return self._newest

    async def open(self, record: WeightRecord) -> Snapshot:
        """The snapshot of published weights."""
        async with self._opening:
            if self._opened != (record.version, record.path):
                self._newest = await self._open_weights(record)
                self._opened = record.version, record.path
            return self.newest


class WeightPublisher:
    """Publishes the weights of a policy in the state of the queue."""

    def __init__(
        self,
        policy: Trainer,
        store: Store,
        method: Literal["memory", "checkpoint"],
        keep: int,
        ttl_seconds: int | None,
    ) -> None:
        """`keep` and `ttl_seconds` apply to checkpoints."""
        self._policy, self._store, self._method, self._ttl = policy, store, method, ttl_seconds
        self._keep = keep if method == "checkpoint" else 1
        self._snapshot: Snapshot | None = None
        self.newest_step = -1
        """Step of the newest weights that this process has published; -1 if it has published none."""

    async def publish(self, step: int) -> None:
        """Publish the current weights as those of `step`, which answers all requests for newer ones.

        Unchanged weights keep their checkpoint. Weights of later steps, which a process has published that went
        further than the state that this one resumes from, are withdrawn.
        """
        previous, version = (await self._store.state()).weights, self._policy.version
        if self.newest_step < 0:
            previous = tuple(record for record in previous if record.step < step)
        if previous and previous[-1].version == version:
            path = previous[-1].path
        else:
            path = await self._save(step)
        records = (*previous, WeightRecord(step=step, version=version, path=path))[-self._keep :]
        await self._store.update(lambda state: state.with_answers().model_copy(update={"weights": records}))
        self.newest_step = step
        for dropped in dict.fromkeys(record.path for record in previous):
            if dropped and dropped not in {record.path for record in records}:
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
