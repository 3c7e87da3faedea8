"""Batches of rollouts, sampled ahead of the steps that train on them.

The producer starts batch after batch as `weight_sync.py` allows, and hands them on in order. A batch in which every
rollout failed is sampled again from other tasks a limited number of times; after that the run ends. How a group is
rolled out is in `runner.py`.

In style fixed with interval 1, at most `staleness` + 1 batches are outstanding: a batch is admitted when the step that
makes room for it was trained and its weights are published. So no batch is more than `staleness` updates old when it is
trained on, and none is discarded. With that many outstanding, this bound allows no other order than the oldest version
first: whoever trains on a newer group before an older one has more groups due at a later step than fit in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tinsmith.errors import TinsmithError
from tinsmith.plurals import counted
from tinsmith.rl.policy.sampling import SamplingConfig, Snapshot
from tinsmith.rl.rollouts.coordination import ChangeNotifier
from tinsmith.rl.rollouts.failures import FailureLimit, errors_of, most_frequent
from tinsmith.rl.rollouts.filters import GroupFilters
from tinsmith.rl.rollouts.progress import Batch, BatchInProgress
from tinsmith.rl.rollouts.runner import RolloutRunner
from tinsmith.rl.rollouts.task_draws import TaskDraws
from tinsmith.rl.rollouts.weight_sync import PublishedWeights, SyncConfig, WeightSource
from tinsmith.rl.types import Group
from tinsmith.rl.workflows.base import Workflow

_RESAMPLE_STREAM = 2
"""Separates the seeds of a batch that is sampled again from all others."""

_REFILL_STREAM = 3
"""Separates the seeds of groups that replace filtered ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """What to sample.

    Example: SamplingPlan(steps=60, groups=16, size=8, staleness=0, seed=0, sync=SyncConfig())
    """

    steps: int | None
    """Batches to sample; None: as many as training takes."""
    groups: int
    """Groups of a batch."""
    size: int
    """Rollouts of a group."""
    staleness: int
    seed: int
    sync: SyncConfig
    filters: GroupFilters = field(default_factory=lambda: GroupFilters(()))
    recomputes: Callable[[SamplingConfig], bool] = lambda sampling: False
    """Whether logprobs of replies sampled with these settings are computed again, at temperature 1."""
    filter_refills: int = 0
    """Further batches to sample, at most, until the filters keep `groups` groups; 0 takes what they keep."""
    min_partial: int = 0
    """Groups that must be solved in part."""
    is_partial: Callable[[Group], bool] = lambda group: False
    """Whether a group is solved in part."""


class BatchProducer:
    """Samples the batches of a run."""

    def __init__(
        self,
        workflow: Workflow,
        draws: TaskDraws,
        weights: WeightSource,
        plan: SamplingPlan,
        runner: RolloutRunner,
        changes: ChangeNotifier,
        put: Callable[[Batch], Awaitable[None]],
    ) -> None:
        """`put` receives each batch, in order; `changes` is notified of progress."""
        self._workflow, self._draws, self._weights, self._plan = workflow, draws, weights, plan
        self._runner, self._changes, self._put = runner, changes, put
        self._failures = FailureLimit(runner.config.max_failures, runner.config.failure_window)
        self._in_flight: dict[int, asyncio.Task[None]] = {}
        self._batches: dict[int, BatchInProgress] = {}
        self._resumed: dict[int, BatchInProgress] = {}
        self._loop: asyncio.Task[None] | None = None
        self._current: PublishedWeights | None = None
        self._current_for = 0  # the batch that they were looked up for
        self._stopped = False
        self.busy = BusyTime()
        """Time in which a batch was being sampled."""
        self.staleness = plan.staleness
        """Batches sampled ahead; may be lowered for a while."""
        self.started = self.done = 0
        """Number of the last batch started, and of the last batch handed on."""
        self.has_capacity: Callable[[int], bool] = lambda number: True
        """Whether the batch with this number may be started."""

    def resume_after(self, done: int, unfinished: Sequence[BatchInProgress] = ()) -> None:
        """Continue after batch `done` of an earlier process, with its batches that were not complete."""
        self.started = self.done = done
        self._resumed = {batch.step: batch for batch in unfinished}

    def start(self) -> None:
        """Start batches from now on."""
        if self._loop is None:
            self._loop = asyncio.create_task(self._produce(), name="batches")
            self._loop.add_done_callback(lambda _: self._changes.notify())

    @property
    def fault(self) -> BaseException | None:
        """Error that stopped sampling, if any."""
        tasks = [task for task in (*self._in_flight.values(), self._loop) if task is not None and task.done()]
        return next((error for task in tasks if (error := task.exception()) is not None), None)

    @property
    def complete(self) -> bool:
        """Whether no further batch will be started."""
        return self.fault is not None or (self._loop is not None and self._loop.done())

    def in_progress(self, number: int) -> BatchInProgress | None:
        """Batch `number`, if it was started and is not handed on yet."""
        return self._batches.get(number)

    async def stop(self, grace: float) -> None:
        """Start no further batch, wait up to `grace` seconds for the batches in flight, and cancel the others."""
        self._stopped = True
        if self.fault is None and self._in_flight:
            await asyncio.wait(self._in_flight.values(), timeout=grace)
        await self.close()

    async def close(self) -> None:
        """Cancel the batches in flight."""
        tasks = [task for task in (*self._in_flight.values(), self._loop) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._in_flight.clear()
        self._loop = None

    async def _produce(self) -> None:
        while True:
            number = await self._draws.upcoming(self.started)
            if self._plan.steps is not None and number > self._plan.steps:
                return
            await self._changes.until(partial(self._may_start, number))
            snapshot, step = await self._weights_for(number)
            if not self._stopped:
                await self._start_batch(number, snapshot, step)

    def _may_start(self, number: int) -> bool:
        sync = self._plan.sync
        has_slot = sync.style != "live" or len(self._in_flight) < sync.in_flight
        return not self._stopped and self.fault is None and self.has_capacity(number) and has_slot

    async def _weights_for(self, number: int) -> tuple[Snapshot, int]:
        """Snapshot that samples batch `number`, and the step of its weights."""
        sync, offset = self._plan.sync, self._plan.staleness
        previous, self._current_for = self._current_for, number
        if sync.style == "fixed":
            before = self._current.step if self._current else 0
            step = max(before, sync.weights_for(number, self.staleness))  # never older ones, if staleness was lowered
            self._current = await self._weights.at(step)
        elif self._current is None:
            self._current = await self._weights.at(0)
        elif sync.style == "live":
            self._current = self._weights.newest()
        elif sync.refreshes_before(number, previous, offset):
            await self._changes.until(lambda: not self._in_flight)
            self._current = await self._weights.newer(self._current.step)
        is_live, newest = sync.style == "live", self._weights.newest
        snapshot = Snapshot.following(lambda: newest().snapshot) if is_live else self._current.snapshot
        return snapshot, self._current.step

    async def _start_batch(self, number: int, snapshot: Snapshot, step: int) -> None:
        """Start batch `number`, unless another process has."""
        batch = self._resumed.pop(number, None) or await self._draws.begin(number)
        if batch is None:
            return
        task = asyncio.create_task(self._sample(batch, snapshot, step), name=f"rollouts of step {number}")
        self.started, self._in_flight[number], self._batches[number] = number, task, batch
        task.add_done_callback(lambda _: self._changes.notify())

    async def _sample(self, batch: BatchInProgress, snapshot: Snapshot, step: int) -> None:
        """Sample a batch, wait for all earlier ones, and hand it on."""
        with self.busy:
            await self._roll_out(batch, snapshot)
            self._failures.add(batch.finished)
            while batch.failed:
                if batch.refills >= self._runner.config.refills:
                    raise _all_failed(batch)
                batch.refills += 1
                batch.clear()
                await self._draws.add(batch, _RESAMPLE_STREAM, batch.refills)
                await self._roll_out(batch, snapshot)
                self._failures.add(batch.finished)
            await self._refill(batch, snapshot)
        numbers = {"sync/weights": float(step), **({"rollouts/refills": float(batch.refills)} if batch.refills else {})}
        if self._plan.filter_refills:
            numbers["filters/refills"] = float(batch.filter_refills)
        complete = batch.as_batch(numbers)
        await self._changes.until(lambda: min(self._in_flight) == batch.step)
        await self._put(complete)
        self.done = batch.step
        del self._in_flight[batch.step], self._batches[batch.step]

    async def _refill(self, batch: BatchInProgress, snapshot: Snapshot) -> None:
        """Add groups of other tasks until the filters keep enough."""
        while self._plan.filter_refills and (missing := self._missing(batch.finished)):
            if batch.filter_refills >= self._plan.filter_refills:
                raise TinsmithError(
                    f"Step {batch.step}: {missing}.",
                    "Raise filter_refills (0 takes what is left), loosen filters, or choose tasks of another "
                    "difficulty.",
                )
            batch.filter_refills += 1
            await self._draws.add(batch, _REFILL_STREAM, batch.filter_refills)
            await self._roll_out(batch, snapshot)

    def _missing(self, groups: Sequence[Group]) -> str:
        """What the groups of a step lack; empty if they are enough."""
        plan = self._plan
        left = plan.filters.remaining(groups)
        if len(left) < plan.groups:
            return f"the filters keep {len(left)} of {counted(len(groups), 'group')}, but a step needs {plan.groups}"
        if (partial := sum(map(plan.is_partial, left))) < plan.min_partial:
            return f"{partial} of {counted(len(left), 'group')} solved in part, but a step needs {plan.min_partial}"
        return ""

    async def _roll_out(self, batch: BatchInProgress, snapshot: Snapshot) -> None:
        """Roll out the tasks that have no group yet; each group is in the batch as soon as it is finished."""
        places = batch.open

        def finished(index: int, group: Group) -> None:
            batch.groups[places[index]] = group
            self._changes.notify()

        over = self._runner.config.over if self._plan.sync.style != "fixed" else None
        groups = await self._runner.run_groups(
            self._workflow,
            [batch.tasks[place] for place in places],
            snapshot,
            size=self._plan.size,
            seeds=[batch.seeds[place] for place in places],
            over=over,
            on_group=finished,
        )
        for place, group in zip(places, groups, strict=True):
            batch.groups[place] = group


class BusyTime:
    """Seconds in which at least one of several blocks was entered, by the clock of the event loop."""

    def __init__(self) -> None:
        self._entered = 0
        self._since = self._seconds = 0.0

    def __enter__(self) -> None:
        if not self._entered:
            self._since = asyncio.get_running_loop().time()
        self._entered += 1

    def __exit__(self, *error: object) -> None:
        self._entered -= 1
        if not self._entered:
            self._seconds += asyncio.get_running_loop().time() - self._since

    @property
    def seconds(self) -> float:
        """Seconds up to now."""
        return self._seconds + (asyncio.get_running_loop().time() - self._since if self._entered else 0.0)


def _all_failed(batch: BatchInProgress) -> TinsmithError:
    earlier = f", as in {counted(batch.refills, 'batch')} before" if batch.refills else ""
    return TinsmithError(
        f"Every rollout of step {batch.step} failed{earlier}. {most_frequent(errors_of(batch.finished))}",
        "Fix the cause; if it was transient, raise rollout.retries and rollout.refills.",
    )
