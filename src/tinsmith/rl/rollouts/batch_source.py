"""What the loop trains on: batches from a sampling side in the same process, or from a buffer that another one fills.

Leaves out how batches are made (`rollouts.py`) and where they wait (`buffers/`).
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from tinsmith.errors import TinsmithError
from tinsmith.rl.policy.base import Policy
from tinsmith.rl.rollouts.buffers.base import Buffer
from tinsmith.rl.rollouts.buffers.replay import BatchSelector, SelectorState
from tinsmith.rl.rollouts.coordination import (
    POLL_SECONDS,
    CoordinationNotes,
    SamplerStatus,
    TrainerStatus,
    WeightRecord,
)
from tinsmith.rl.rollouts.producer import Batch, BatchProducer, SamplingPlan
from tinsmith.rl.rollouts.weight_sync import ChangeNotifier, LocalWeights, WeightPublisher
from tinsmith.settings import Settings


class BatchSourceState(Settings):
    """Where a supply is, for a run that goes on."""

    reading: SelectorState = SelectorState()
    sampled: int = 0
    """Batches sampled."""
    batches: tuple[Batch, ...] = ()
    """Those that wait, where nothing else keeps them."""


class BatchSource(Protocol):
    """Asked by the loop, step by step."""

    async def next(self, step: int) -> Batch:
        """What `step` trains on. Raises TinsmithError where none will come."""
        ...

    async def trained(self, step: int) -> None:
        """The policy has seen `step` steps: its weights may be sampled from."""
        ...

    async def settle(self) -> BatchSourceState:
        """Waits for what is under way; returns where to go on from."""
        ...

    async def saved(self) -> None:
        """What `settle` returned is on disk."""
        ...

    async def restore(self, state: BatchSourceState) -> None:
        """What `settle` returned in an earlier process."""
        ...

    async def close(self) -> None:
        """Stops what is under way."""
        ...


class LocalBatchSource:
    """Samples and trains in one process."""

    def __init__(
        self,
        sampler: BatchProducer,
        buffer: Buffer,
        reader: BatchSelector,
        weights: LocalWeights,
        publisher: WeightPublisher,
        policy: Policy,
        plan: SamplingPlan,
        changes: ChangeNotifier,
        capacity: int,
    ) -> None:
        """`sampler` puts into `buffer` and samples by `weights`; `capacity` is the number of batches that may wait."""
        self._sampler, self._buffer, self._reader = sampler, buffer, reader
        self._weights, self._publisher, self._policy = weights, publisher, policy
        self._sync, self._bell = plan.sync, changes
        self._fixed = plan.sync.style == "fixed"
        self._published = -1
        if not self._fixed:
            sampler.room = lambda: sampler.begun - reader.taken < capacity

    async def next(self, step: int) -> Batch:
        """What the reader says. Raises what broke the sampling off: at once where batches come again, for they never
        run out, and else when what was sampled before is trained on."""
        now = step - 1
        if self._published < 0 or (self._fixed and now % self._sync.interval == 0):
            await self._publish(now)
        self._sampler.start()
        if self._fixed:  # so that what is under way at any step is the same in every run
            await self._bell.until(lambda: self._weights.waiting or self._sampler.complete)
        while True:
            seen, fault = self._bell.rings, self._sampler.fault
            if fault is not None and self._reader.reuses:
                raise fault
            last = self._fixed and self._sampler.done >= step  # the next is sampled by weights of a later step
            if (batch := await self._reader.take(self._policy.version, again=last)) is not None:
                return batch
            if fault is not None:
                raise fault
            await self._serve(now)
            await self._bell.rung_since(seen, POLL_SECONDS)

    async def trained(self, step: int) -> None:
        """In style fixed, weights go out with the next step's question: nothing is under way while a run is saved."""
        match self._sync.style:
            case "on_publish" | "live" if step % self._sync.period == 0:
                await self._publish(step)
            case "on_demand" if self._weights.wanted is not None:
                await self._publish(step)

    async def settle(self) -> BatchSourceState:
        """All of it, or where it is, if the buffer outlives the process."""
        await self._sampler.settle()
        held = () if self._buffer.durable else sorted(await self._buffer.numbers())
        done = self._reader.done
        batches = [await self._buffer.get(number) for number in held if number not in done]
        return BatchSourceState(reading=self._reader.state, sampled=self._sampler.done, batches=tuple(batches))

    async def saved(self) -> None:
        """Drops what was trained on for the last time."""
        await self._reader.clear()

    async def restore(self, state: BatchSourceState) -> None:
        """What was sampled after that is sampled again."""
        self._sampler.go_on(state.sampled)
        self._reader.restore(state.reading)
        for batch in state.batches:
            await self._buffer.put(batch)
        await self._buffer.drop([number for number in await self._buffer.numbers() if number > state.sampled])

    async def close(self) -> None:
        """Stops what is under way."""
        await self._sampler.close()
        await self._buffer.close()

    async def _publish(self, step: int) -> None:
        _, snapshot = await self._publisher.publish(step)
        self._published = step
        self._weights.offer(step, snapshot)

    async def _serve(self, now: int) -> None:
        """Training waits: who waits for newer weights gets the newest, or goes on with those there are."""
        if self._weights.wanted is None:
            return
        if self._sync.style == "on_demand" and now > self._published:
            await self._publish(now)
        else:
            self._weights.none_newer()


class EmptyBatchSource:
    """Of a run that samples nothing: what it learns from, others said."""

    async def next(self, step: int) -> Batch:
        """Without groups."""
        return Batch(step=step, groups=())

    async def trained(self, step: int) -> None:
        """Nobody samples."""

    async def settle(self) -> BatchSourceState:
        """Nothing."""
        return BatchSourceState()

    async def saved(self) -> None:
        """Nothing waits."""

    async def restore(self, state: BatchSourceState) -> None:
        """Nothing."""

    async def close(self) -> None:
        """Nothing."""


class SharedBatchSource:
    """Implements `supply.Supply`."""

    def __init__(
        self,
        buffer: Buffer,
        reader: BatchSelector,
        policy: Policy,
        plan: SamplingPlan,
        steps: int,
        ttl_seconds: int | None,
    ) -> None:
        """`steps` of the run; `ttl_seconds` of the checkpoints that are published."""
        self._buffer, self._reader, self._policy = buffer, reader, policy
        self._notes, self._sync, self._keep = CoordinationNotes(buffer), plan.sync, plan.sync.kept(plan.staleness)
        self._steps, self._ttl = steps, ttl_seconds
        self._weights: tuple[WeightRecord, ...] | None = None

    async def next(self, step: int) -> Batch:
        """Raises TinsmithError where the other process failed or has ended, or none comes within the timeout."""
        now, end = step - 1, time.monotonic() + self._sync.timeout
        if self._weights is None:
            self._weights = tuple(one for one in await self._notes.weights() if one.step < now)
            await self._publish(now)
        await self._notes.tell_training(TrainerStatus(taken=self._reader.taken))
        while True:
            sampling = await self._notes.sampling()  # before the buffer: what was put before it ended is there
            failed = sampling.state == "failed"
            batch = None if failed and self._reader.reuses else await self._take(step, sampling)
            if batch is not None:
                return batch
            if failed:
                raise TinsmithError(f"The process that samples failed: {sampling.reason}", "Mend it, and start both.")
            if sampling.state == "ended":
                raise TinsmithError(
                    f"There is no batch for step {step}, and the process that samples has ended.",
                    "Start it again with more steps, or take fewer here.",
                )
            if time.monotonic() > end:
                raise TinsmithError(
                    f"No batch for step {step} within {self._sync.timeout:g} seconds.",
                    "Is the run's process of mode explore under way? If it is, set sync.timeout higher.",
                )
            await self._serve(now)
            await asyncio.sleep(POLL_SECONDS)

    async def _take(self, step: int, sampling: SamplerStatus) -> Batch | None:
        """The reader's next, if there is one; sampling is told what need not be waited for, be it left out."""
        last = self._sync.style == "fixed" and sampling.done >= step  # the next is sampled by weights of a later step
        before = self._reader.taken
        batch = await self._reader.take(self._policy.version, again=last)
        if self._reader.taken != before:
            await self._notes.tell_training(TrainerStatus(taken=self._reader.taken))
        return batch

    async def trained(self, step: int) -> None:
        """Publishes what is due, whatever is saved at this step."""
        match self._sync.style:
            case "on_demand":
                due = await self._notes.wanted()
            case "fixed":
                due = step % self._sync.interval == 0
            case _:
                due = step % self._sync.period == 0
        if due:
            await self._publish(step)
        if step == self._steps:
            await self._notes.tell_training(TrainerStatus(taken=self._reader.taken, ended_at=step))

    async def settle(self) -> BatchSourceState:
        """Where it is in the buffer, which outlives the process."""
        return BatchSourceState(reading=self._reader.state)

    async def saved(self) -> None:
        """Drops what was trained on for the last time."""
        await self._reader.clear()

    async def restore(self, state: BatchSourceState) -> None:
        """What was sampled meanwhile is in the buffer."""
        self._reader.restore(state.reading)

    async def close(self) -> None:
        """Lets go of the buffer."""
        await self._buffer.close()

    async def _publish(self, step: int) -> None:
        """A named checkpoint; where there was no update since the last one, the same again."""
        known = self._weights or ()
        version = self._policy.version
        path = known[-1].path if known and known[-1].version == version else ""
        if not path:
            path = await self._policy.save_for_sampling(f"sync-{step:06}", self._ttl)
        kept = (*known, WeightRecord(step=step, version=version, path=path))[-self._keep :]
        self._weights = kept
        await self._notes.tell_weights(kept)
        for old in {one.path for one in known} - {one.path for one in kept}:
            await self._policy.delete_checkpoint(old)

    async def _serve(self, now: int) -> None:
        """Training waits: who looks for newer weights gets the newest, or goes on with those there are."""
        if not await self._notes.wanted():
            return
        if self._sync.style == "on_demand" and self._weights and now > self._weights[-1].step:
            await self._publish(now)
        else:
            await self._notes.none_newer()
