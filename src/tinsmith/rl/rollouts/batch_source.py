"""Batches for the training loop: taken from a buffer that is filled in this process or in another one.

The two sides of a run exchange batches through a buffer and weights through notes (`coordination.py`). How batches are
sampled is in `producer.py`, which batch is next in `buffers/replay.py`.
"""

from __future__ import annotations

import time
from typing import Protocol

from typing_extensions import override

from tinsmith.errors import TinsmithError
from tinsmith.rl.policy.base import Policy
from tinsmith.rl.rollouts.buffers.base import Buffer
from tinsmith.rl.rollouts.buffers.replay import BatchSelector, SelectorState
from tinsmith.rl.rollouts.coordination import CoordinationNotes, SamplerStatus, TrainerStatus
from tinsmith.rl.rollouts.producer import Batch
from tinsmith.rl.rollouts.sampling_loop import SamplingLoop
from tinsmith.rl.rollouts.stored_batch import StoredBatch
from tinsmith.rl.rollouts.weight_sync import SyncConfig, WeightPublisher
from tinsmith.settings import Settings


class BatchSourceState(Settings):
    """State of a batch source in state.json."""

    reading: SelectorState = SelectorState()
    sampled: int = 0
    """Batches sampled."""
    batches: tuple[StoredBatch, ...] = ()
    """Batches that wait, if the buffer does not outlive the process."""


class BatchSource(Protocol):
    """Batches, step by step."""

    async def next(self, step: int) -> Batch:
        """The batch that `step` trains on. Raises TinsmithError if there will be none."""
        ...

    async def mark_trained(self, step: int) -> None:
        """Report that the policy was trained on `step` steps, so that its weights may be published."""
        ...

    async def capture_state(self) -> BatchSourceState:
        """Wait for the batches in flight and return the state to resume from."""
        ...

    async def state_saved(self) -> None:
        """Report that the captured state is on disk: batches that are used up may be deleted."""
        ...

    async def restore(self, state: BatchSourceState) -> None:
        """Load a captured state."""
        ...

    async def close(self) -> None:
        """Cancel the batches in flight and close the buffer."""
        ...


class EmptyBatchSource(BatchSource):
    """Batches without groups, for a run that learns from demonstrations alone."""

    @override
    async def next(self, step: int) -> Batch:
        return Batch(step=step, groups=())

    @override
    async def mark_trained(self, step: int) -> None:
        """No weights are published."""

    @override
    async def capture_state(self) -> BatchSourceState:
        return BatchSourceState()

    @override
    async def state_saved(self) -> None:
        """There is no buffer."""

    @override
    async def restore(self, state: BatchSourceState) -> None:
        """There is no state."""

    @override
    async def close(self) -> None:
        """There is no buffer."""


class BufferedBatchSource(BatchSource):
    """Batches from a buffer, sampled by weights that this side publishes."""

    def __init__(
        self,
        buffer: Buffer,
        selector: BatchSelector,
        policy: Policy,
        publisher: WeightPublisher,
        notes: CoordinationNotes,
        sync: SyncConfig,
        *,
        last_step: int,
        sampling: SamplingLoop | None = None,
    ) -> None:
        """`sampling` fills the buffer in this process; if it is None, another process does."""
        self._buffer, self._selector, self._policy = buffer, selector, policy
        self._publisher, self._notes, self._sync = publisher, notes, sync
        self._last_step, self._sampling = last_step, sampling

    @override
    async def next(self, step: int) -> Batch:
        """In one process, raises the error that stopped sampling: at once if old batches can be reused, which never run
        out, else when the batches sampled before the error are used up. With two processes, also raises TinsmithError
        if sampling has ended or no batch comes within the timeout."""
        trained, end = step - 1, time.monotonic() + self._sync.timeout
        if not self._publisher.started or (self._publishes_late and trained % self._sync.interval == 0):
            await self._publisher.publish(trained)
        await self._notes.write_training(TrainerStatus(taken=self._selector.taken))
        if self._sampling is not None:
            await self._sampling.start()
        while True:
            seen = self._notes.changes.count
            status = await self._notes.sampling()  # before the buffer: batches put before sampling ended are there
            fault = self._fault(status)
            batch = None if fault is not None and self._selector.reuses else await self._take(step, status)
            if batch is not None:
                return batch
            if fault is not None:
                raise fault
            if self._sampling is None:
                self._check_other_process(step, status, end)
            await self._answer_request(trained)
            await self._notes.wait(seen)

    @override
    async def mark_trained(self, step: int) -> None:
        match self._sync.style:
            case "fixed":
                due = not self._publishes_late and step % self._sync.interval == 0
            case "on_demand":
                due = await self._notes.weights_wanted()
            case _:
                due = step % self._sync.publish_interval == 0
        if due:
            await self._publisher.publish(step)
        if self._sampling is None and step == self._last_step:
            await self._notes.write_training(TrainerStatus(taken=self._selector.taken, ended_at=step))

    @override
    async def capture_state(self) -> BatchSourceState:
        if self._sampling is None:
            return BatchSourceState(reading=self._selector.state)
        await self._sampling.drain()
        waiting = () if self._buffer.durable else sorted(await self._buffer.numbers())
        used = self._selector.done
        batches = [await self._buffer.get(number) for number in waiting if number not in used]
        return BatchSourceState(reading=self._selector.state, sampled=self._sampling.done, batches=tuple(batches))

    @override
    async def state_saved(self) -> None:
        await self._selector.clear()

    @override
    async def restore(self, state: BatchSourceState) -> None:
        """In one process, batches sampled after the state was captured are sampled again."""
        self._selector.restore(state.reading)
        if self._sampling is None:
            return
        self._sampling.resume_after(state.sampled)
        await self._notes.write_sampling(SamplerStatus(done=state.sampled))
        for batch in state.batches:
            await self._buffer.put(batch)
        await self._buffer.drop([number for number in await self._buffer.numbers() if number > state.sampled])

    @override
    async def close(self) -> None:
        if self._sampling is not None:
            await self._sampling.close()
        await self._buffer.close()

    @property
    def _publishes_late(self) -> bool:
        """Whether weights are published when the next step begins instead of right after training.

        In one process and style fixed they are, so that no batch is in flight while the run is saved. Another process
        should not wait until the run is saved.
        """
        return self._sampling is not None and self._sync.style == "fixed"

    def _fault(self, status: SamplerStatus) -> BaseException | None:
        if self._sampling is not None:
            return self._sampling.fault
        if status.state == "failed":
            return TinsmithError(
                f"The process that samples failed: {status.reason}", "Fix the cause, and start both processes again."
            )
        return None

    async def _take(self, step: int, status: SamplerStatus) -> Batch | None:
        """The next batch if there is one. Sampling learns of every batch taken, also of those that are dropped."""
        is_last = self._sync.style == "fixed" and status.done >= step  # the next one needs weights of a later step
        taken = self._selector.taken
        batch = await self._selector.take(self._policy.version, again=is_last)
        if self._selector.taken != taken:
            await self._notes.write_training(TrainerStatus(taken=self._selector.taken))
        return batch

    def _check_other_process(self, step: int, status: SamplerStatus, end: float) -> None:
        if status.state == "ended":
            raise TinsmithError(
                f"There is no batch for step {step}, and the process that samples has ended.",
                "Start it again with more steps, or take fewer steps here.",
            )
        if time.monotonic() > end:
            raise TinsmithError(
                f"No batch for step {step} within {self._sync.timeout:g} seconds.",
                "Check that the run's process of mode explore is running; if it is, raise sync.timeout.",
            )

    async def _answer_request(self, trained: int) -> None:
        """Training waits: publish newer weights if sampling waits for them, or let it continue without."""
        if not await self._notes.weights_wanted():
            return
        if self._sync.style == "on_demand" and trained > self._publisher.newest_step:
            await self._publisher.publish(trained)
        else:
            await self._notes.decline_weights()
