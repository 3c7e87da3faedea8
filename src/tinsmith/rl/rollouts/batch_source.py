"""Batches for the training loop: taken from a buffer that is filled in this process or in another one.

The two sides of a run exchange batches through a buffer and weights through notes (`coordination.py`). How batches are
sampled is in `producer.py`, which batch is next in `buffers/replay.py`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from typing_extensions import override

from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.plurals import counted
from tinsmith.rl.ending.stop import StopSignal
from tinsmith.rl.policy.trainer import Trainer
from tinsmith.rl.rollouts.buffers.base import Buffer
from tinsmith.rl.rollouts.buffers.replay import BatchSelector, SelectorState
from tinsmith.rl.rollouts.coordination import CoordinationNotes, SamplerStatus, TrainerStatus
from tinsmith.rl.rollouts.progress import Batch, BatchInProgress, succeeded
from tinsmith.rl.rollouts.sampling_loop import SamplingLoop
from tinsmith.rl.rollouts.task_draws import TaskRecord, read_tasks
from tinsmith.rl.rollouts.weight_sync import SyncConfig, WeightPublisher
from tinsmith.rl.types import Group
from tinsmith.settings import Settings


class BatchSourceState(Settings):
    """State of a batch source in state.json."""

    reading: SelectorState = SelectorState()
    sampled: int = 0
    """Batches sampled."""
    batches: tuple[Batch, ...] = ()
    """Batches that wait, if the buffer does not outlive the process."""
    unfinished: tuple[BatchInProgress, ...] = ()
    """Batches that were started and are not complete: their tasks and finished groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPosition:
    """How far training and sampling are at a moment.

    Example: BatchPosition(reading=SelectorState(next=4), used=frozenset({1, 2, 3}), taken=3, started=5)
    """

    reading: SelectorState = field(default_factory=SelectorState)
    used: frozenset[int] = frozenset()
    """Batches that are used up and still in the buffer."""
    taken: int = 0
    """Number of batches taken."""
    started: int = 0
    """Number of the last batch that was started in this process."""


class BatchSource(Protocol):
    """Batches, step by step."""

    async def next(self, step: int) -> Batch:
        """The batch that `step` trains on. Raises TinsmithError if there will be none, and StopRequested if the run is
        to stop."""
        ...

    def stream(self, step: int, size: int) -> AsyncIterator[dict[int, Group]]:
        """Groups of the batch of `step` by their place in it, `size` at a time as they finish, until fewer are left.

        `next` then returns the whole batch. Nothing is streamed if another process samples, or if batches may be
        dropped or used again.
        """
        ...

    async def mark_trained(self, step: int) -> None:
        """Report that the policy was trained on `step` steps, so that its weights may be published.

        Sampling goes on by them. Call `position` before, if the step is to be saved.
        """
        ...

    def limit_staleness(self, limit: int | None) -> None:
        """Sample at most `limit` batches ahead from the next one on, in style fixed; None: as many as the run sets."""
        ...

    async def stop(self, grace: float) -> None:
        """Start no further batch, wait up to `grace` seconds for the batches in flight, and cancel the others."""
        ...

    def position(self) -> BatchPosition:
        """The position from which a checkpoint of this moment resumes."""
        ...

    def complete_up_to(self, position: BatchPosition) -> bool:
        """Whether the batches started before `position` are complete, so that a resumed run has the same ones."""
        ...

    async def state_at(self, position: BatchPosition) -> BatchSourceState:
        """The state to resume from at `position`. Batches that are not complete are stored as far as they are."""
        ...

    async def state_saved(self, position: BatchPosition) -> None:
        """Report that the state at `position` is on disk: batches that were used up then may be deleted."""
        ...

    @property
    def busy_seconds(self) -> float | None:
        """Seconds in which this process sampled a batch, by the clock of the event loop; None if it samples none."""
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
    async def stream(self, step: int, size: int) -> AsyncIterator[dict[int, Group]]:
        for part in ():
            yield part

    @override
    async def mark_trained(self, step: int) -> None:
        """No weights are published."""

    @override
    def limit_staleness(self, limit: int | None) -> None:
        """Nothing is sampled."""

    @override
    async def stop(self, grace: float) -> None:
        """Nothing is in flight."""

    @override
    def position(self) -> BatchPosition:
        return BatchPosition()

    @override
    def complete_up_to(self, position: BatchPosition) -> bool:
        return True

    @override
    async def state_at(self, position: BatchPosition) -> BatchSourceState:
        return BatchSourceState()

    @override
    async def state_saved(self, position: BatchPosition) -> None:
        """There is no buffer."""

    @property
    @override
    def busy_seconds(self) -> None:
        return None

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
        policy: Trainer,
        publisher: WeightPublisher,
        notes: CoordinationNotes,
        sync: SyncConfig,
        *,
        last_step: int,
        sampling: SamplingLoop | None = None,
        stop: StopSignal | None = None,
    ) -> None:
        """`sampling` fills the buffer in this process; if it is None, another process does."""
        self._buffer, self._selector, self._policy = buffer, selector, policy
        self._publisher, self._notes, self._sync = publisher, notes, sync
        self._last_step, self._sampling, self._stop = last_step, sampling, stop or StopSignal()
        self._staleness = sampling.staleness if sampling is not None else 0

    @override
    async def next(self, step: int) -> Batch:
        """In one process, raises the error that stopped sampling: at once if old batches can be reused, which never run
        out, else when the batches sampled before the error are used up. With two processes, also raises TinsmithError
        if sampling has ended or no batch comes within the timeout."""
        trained, end = step - 1, time.monotonic() + self._sync.timeout
        await self._begin(trained)
        while True:
            self._stop.check()
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
    async def stream(self, step: int, size: int) -> AsyncIterator[dict[int, Group]]:
        if (sampling := self._sampling) is None or not self._selector.keeps_order:
            return
        await self._begin(step - 1)
        number, streamed = self._selector.taken + 1, set[int]()
        while sampling.fault is None and (batch := sampling.in_progress(number)) is not None:
            self._stop.check()
            seen = self._notes.changes.count
            finished = {at: group for at, group in enumerate(batch.groups) if group is not None and succeeded(group)}
            ready = sorted(finished.keys() - streamed)[:size]
            if len(ready) == size:
                streamed.update(ready)
                yield {at: finished[at] for at in ready}
            elif batch.open:
                await self._notes.wait(seen)
            else:
                return

    @override
    async def mark_trained(self, step: int) -> None:
        match self._sync.style:
            case "fixed":
                wanted = self._sampling is None or not (self._publishes_late or self._sampling.complete)
                due = wanted and step % self._sync.interval == 0
            case "on_demand":
                due = await self._notes.weights_wanted()
            case _:
                due = step % self._sync.publish_interval == 0
        if due:
            await self._publisher.publish(step)
        if self._sampling is None and step == self._last_step:
            await self._notes.write_training(TrainerStatus(taken=self._selector.taken, ended_at=step))

    @override
    def limit_staleness(self, limit: int | None) -> None:
        if self._sampling is not None:
            self._sampling.staleness = self._staleness if limit is None else min(limit, self._staleness)

    @override
    async def stop(self, grace: float) -> None:
        if self._sampling is not None:
            await self._sampling.stop(grace)

    @override
    def position(self) -> BatchPosition:
        started = self._sampling.started if self._sampling is not None else 0
        selector = self._selector
        return BatchPosition(reading=selector.state, used=selector.done, taken=selector.taken, started=started)

    @override
    def complete_up_to(self, position: BatchPosition) -> bool:
        sampling = self._sampling
        return sampling is None or sampling.done >= position.started or sampling.fault is not None

    @override
    async def state_at(self, position: BatchPosition) -> BatchSourceState:
        if (sampling := self._sampling) is None:
            return BatchSourceState(reading=position.reading)
        sampled = min(sampling.done, position.started)
        if not self._selector.replays:  # a batch may be taken before the one who sampled it has noted that it is done
            sampled = max(sampled, position.taken)
        started = [sampling.in_progress(number) for number in range(sampled + 1, position.started + 1)]
        unfinished = tuple(batch.copy() for batch in started if batch is not None)
        waiting = () if self._buffer.durable else sorted(await self._buffer.numbers())
        wanted = [number for number in waiting if number <= sampled and number not in position.used]
        batches = [await self._buffer.get(number) for number in wanted]
        return BatchSourceState(
            reading=position.reading, sampled=sampled, batches=tuple(batches), unfinished=unfinished
        )

    @override
    async def state_saved(self, position: BatchPosition) -> None:
        used = set(position.used)
        if self._sampling is None:
            record = await read_tasks(self._buffer)
            numbers = await self._buffer.numbers()
            if not self._selector.replays:  # used by a process that was killed before it deleted them, or sampled twice
                used.update(number for number in numbers if number < position.reading.next)
            # a batch that its process has not noted yet would be sampled again if it were deleted
            used = {number for number in used if record is None or record.is_closed(number)}
        await self._selector.clear(used)

    @property
    @override
    def busy_seconds(self) -> float | None:
        return self._sampling.busy_seconds if self._sampling is not None else None

    @override
    async def restore(self, state: BatchSourceState) -> None:
        """In one process, batches started after the state was captured are sampled again, and those that were not
        complete are completed by the weights of the checkpoint."""
        self._selector.restore(state.reading)
        if self._sampling is None:
            await self._check_next_is_there()
            return
        self._sampling.resume_after(state.sampled, state.unfinished)
        await self._notes.write_sampling(SamplerStatus(done=state.sampled))
        for batch in state.batches:
            await self._buffer.put(batch)
        await self._buffer.drop([number for number in await self._buffer.numbers() if number > state.sampled])

    @override
    async def close(self) -> None:
        if self._sampling is not None:
            await self._sampling.close()
        await self._buffer.close()

    async def _check_next_is_there(self) -> None:
        """Raise ConfigError if the buffer is that of another run, which has used the next batch."""
        number = self._selector.taken + 1
        record = await read_tasks(self._buffer) or TaskRecord()  # before the numbers: a batch is closed after it is put
        if not self._selector.replays and record.is_closed(number) and number not in await self._buffer.numbers():
            raise ConfigError(
                f"Batch {number} is not in the buffer any more: another run or a later state has used it.",
                "Set another buffer.run or buffer.path for a new run; to resume a run, use its folder.",
            )

    async def _begin(self, trained: int) -> None:
        """Publish the weights of step `trained` if they are due, and let sampling go on."""
        late = self._publishes_late and trained % self._sync.interval == 0 and self._publisher.newest_step != trained
        if late or not self._publisher.started:
            await self._publisher.publish(trained)
        await self._notes.write_training(TrainerStatus(taken=self._selector.taken))
        if self._sampling is not None:
            await self._sampling.start()

    @property
    def _publishes_late(self) -> bool:
        """Whether weights are published when the next step begins instead of right after training.

        Synchronous runs in one process do so: nothing is sampled while they evaluate and save, so that evaluations and
        rollouts use shared values and random generators one after the other, as after a resume.
        """
        return self._sampling is not None and self._sync.style == "fixed" and not self._staleness

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
                f"No batch for step {step} within {counted(self._sync.timeout, 'second')}.",
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
