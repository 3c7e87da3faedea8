"""The sampling side of a run: fills the buffer with batches, in the process of the trainer or in its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from tinsmith.rl.ending.stop import StopSignal
from tinsmith.rl.policy.sampling import Snapshot, recomputing
from tinsmith.rl.rollouts.buffers.base import Buffer
from tinsmith.rl.rollouts.coordination import CoordinationNotes, SamplerStatus, WeightRecord
from tinsmith.rl.rollouts.producer import BatchProducer, SamplingPlan
from tinsmith.rl.rollouts.progress import Batch, BatchInProgress
from tinsmith.rl.rollouts.runner import RolloutRunner
from tinsmith.rl.rollouts.task_draws import TaskDraws
from tinsmith.rl.rollouts.weight_sync import OpenWeights, WeightSubscriber
from tinsmith.rl.workflows.base import Workflow

PUT_S = 30.0
"""Longest wait, after the end of training, for a batch that is being put into the buffer."""


class TrainingEnded(Exception):
    """Training has ended; no further batch is needed."""

    def __init__(self, step: int) -> None:
        """`step` was the last one."""
        super().__init__(step)
        self.step = step


class SamplingLoop:
    """Samples batches into a buffer, by the weights and at the pace that training writes in the notes."""

    def __init__(
        self,
        workflow: Workflow,
        draws: TaskDraws,
        open_weights: OpenWeights,
        plan: SamplingPlan,
        runner: RolloutRunner,
        buffer: Buffer,
        notes: CoordinationNotes,
        *,
        capacity: int,
        timeout_hint: str,
        on_batch: Callable[[Batch, SamplerStatus], None] | None = None,
    ) -> None:
        """`capacity`: batches that may wait in the buffer, in every style but fixed. `timeout_hint` says what to do
        when no weights are published. `on_batch` is called for each batch that this process has put into the
        buffer, with the status that is then written."""

        async def open_recomputing(record: WeightRecord) -> Snapshot:
            return (await open_weights(record)).around(recomputing(plan.recomputes))

        self._buffer, self._notes, self._sync, self._on_batch = buffer, notes, plan.sync, on_batch
        self._draws = draws
        self._weights = WeightSubscriber(notes, open_recomputing, plan.sync.timeout, timeout_hint)
        self._producer = BatchProducer(workflow, draws, self._weights, plan, runner, notes.changes, self._put)
        self._taken = 0
        self._putting = 0
        """Batches that are being put into the buffer or noted."""
        if plan.sync.style != "fixed":
            self._producer.has_capacity = lambda number: number - 1 - self._taken < capacity
        self._follower: asyncio.Task[None] | None = None

    @property
    def done(self) -> int:
        """Number of the last batch in the buffer. Training may have taken it before sampling noted it."""
        return max(self._producer.done, self._taken)

    @property
    def fault(self) -> BaseException | None:
        """Error that stopped sampling, if any."""
        if self._follower is not None and self._follower.done() and (error := self._follower.exception()) is not None:
            return error
        return self._producer.fault

    @property
    def started(self) -> int:
        """Number of the last batch that was started."""
        return self._producer.started

    @property
    def complete(self) -> bool:
        """Whether no further batch will be started."""
        return self._producer.complete

    @property
    def busy_seconds(self) -> float:
        """Seconds in which a batch was being sampled, by the clock of the event loop."""
        return self._producer.busy.seconds

    @property
    def staleness(self) -> int:
        """Batches sampled ahead, in style fixed."""
        return self._producer.staleness

    @staleness.setter
    def staleness(self, value: int) -> None:
        self._producer.staleness = value

    def in_progress(self, number: int) -> BatchInProgress | None:
        """Batch `number`, if it was started and is not in the buffer yet."""
        return self._producer.in_progress(number)

    def resume_after(self, done: int, unfinished: Sequence[BatchInProgress] = ()) -> None:
        """Continue after batch `done` of an earlier process, with its batches that were not complete."""
        self._producer.resume_after(done, unfinished)

    async def run(self, steps: int, ended_before: int = 0, stop: StopSignal | None = None) -> None:
        """Sample until every batch is in the buffer, in a process of its own.

        Raises TrainingEnded, StopRequested at `stop`, or the error that stopped sampling. If training had
        `ended_before` at an earlier step, it may be restarted with more steps.
        """
        self._producer.start()
        while True:
            seen = self._notes.changes.count
            if stop is not None:
                stop.check()
            if (fault := self._producer.fault) is not None:
                raise fault
            if self._producer.complete and self._producer.done == self._producer.started:
                return
            ended_at = await self._follow_training()
            if ended_at >= steps or ended_at not in (0, ended_before):
                with suppress(TimeoutError):  # training may take the last batch before it is noted here
                    async with asyncio.timeout(PUT_S):
                        await self._notes.changes.until(lambda: not self._putting)
                raise TrainingEnded(ended_at)
            await self._notes.wait(seen)

    async def start(self) -> None:
        """Sample in the background of the trainer's process.

        In style fixed, return when no batch can be started by the published weights: so the batches in flight at a
        step are the same in every run.
        """
        if self._follower is None and self._sync.style != "fixed":  # which needs neither capacity nor newer weights
            self._follower = asyncio.create_task(self._follow(), name="trainer status")
        self._producer.start()
        if self._sync.style == "fixed":
            await self._notes.changes.until(lambda: self._weights.waiting or self._producer.complete)

    async def stop(self, grace: float) -> None:
        """Start no further batch, wait up to `grace` seconds for the batches in flight, and cancel the others."""
        await self._producer.stop(grace)

    async def close(self) -> None:
        """Cancel the batches in flight."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        await self._producer.close()

    async def _follow(self) -> None:
        while True:
            seen = self._notes.changes.count
            await self._follow_training()
            await self._notes.wait(seen)

    async def _follow_training(self) -> int:
        """Read how many batches training has taken, and in style live its weights. Returns the step it ended at."""
        training = await self._notes.training()
        if training.taken != self._taken:
            self._taken = training.taken
            self._notes.changes.notify()
        if self._sync.style == "live":
            await self._weights.refresh()
        return training.ended_at

    async def _put(self, batch: Batch) -> None:
        self._putting += 1
        try:
            status = SamplerStatus(done=await self._draws.finish(batch, self._buffer.put))
            if self._on_batch:
                self._on_batch(batch, status)
            await self._notes.write_sampling(status)
        finally:
            self._putting -= 1
            self._notes.changes.notify()
