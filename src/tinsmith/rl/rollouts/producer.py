"""Batches of rollouts, sampled ahead of the steps that train on them.

The producer starts batch after batch as `weight_sync.py` allows, and hands them on in order. A batch in which every
rollout failed is sampled again from other tasks a limited number of times; after that the run ends. How a group is
rolled out is in `runner.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tinsmith.errors import TinsmithError
from tinsmith.rl.data.tasks import TaskSampler
from tinsmith.rl.policy.base import SamplingConfig, Snapshot, request_seed
from tinsmith.rl.rollouts.coordination import ChangeNotifier
from tinsmith.rl.rollouts.filters import FilterConfig, apply_filters
from tinsmith.rl.rollouts.runner import RolloutRunner
from tinsmith.rl.rollouts.weight_sync import LiveSnapshot, PublishedWeights, SyncConfig, WeightSource
from tinsmith.rl.types import Group, Task
from tinsmith.rl.workflows.base import Workflow

_RESAMPLE_STREAM = 2
"""Separates the seeds of a batch that is sampled again from all others."""

_REFILL_STREAM = 3
"""Separates the seeds of groups that replace filtered ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups of one step.

    Example: Batch(step=3, groups=(group, group), cursor=48, numbers={"sync/weights": 2.0})
    """

    step: int
    """Number of the batch, from 1: the step that trains on it, unless batches are reused or taken out of order."""
    groups: tuple[Group, ...]
    cursor: int = 0
    """Training tasks drawn when the last task of this batch was drawn, for this and other batches."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Metrics of sampling."""


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
    filters: tuple[FilterConfig, ...] = ()
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
        task_sampler: TaskSampler,
        weights: WeightSource,
        plan: SamplingPlan,
        runner: RolloutRunner,
        changes: ChangeNotifier,
        put: Callable[[Batch], Awaitable[None]],
    ) -> None:
        """`put` receives each batch, in order; `changes` is notified of progress."""
        self._workflow, self._task_sampler, self._weights, self._plan = workflow, task_sampler, weights, plan
        self._runner, self._changes, self._put = runner, changes, put
        self._in_flight: dict[int, asyncio.Task[None]] = {}
        self._cursors: dict[int, int] = {}
        self._loop: asyncio.Task[None] | None = None
        self._current: PublishedWeights | None = None
        self._paused = False
        self.started = self.done = 0
        """Number of the last batch started, and of the last batch handed on."""
        self.has_capacity: Callable[[], bool] = lambda: True
        """Whether another batch may be started."""

    def resume_after(self, done: int) -> None:
        """Continue after batch `done` of an earlier process."""
        self.started = self.done = done

    def start(self) -> None:
        """Start batches from now on, also after `drain`."""
        self._paused = False
        self._changes.notify()
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

    async def drain(self) -> None:
        """Start no further batch, and return when the batches in flight are handed on or sampling has failed."""
        self._paused = True
        while self.fault is None and self._in_flight:
            await asyncio.wait(self._in_flight.values(), return_when=asyncio.FIRST_COMPLETED)
        if self.fault is None:
            self.started = self.done

    async def close(self) -> None:
        """Cancel the batches in flight."""
        tasks = [task for task in (*self._in_flight.values(), self._loop) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._in_flight.clear()

    async def _produce(self) -> None:
        while self._plan.steps is None or self.started < self._plan.steps:
            await self._changes.until(lambda: not self._paused and self._may_start())
            snapshot, step = await self._weights_for(self.started + 1)
            if not self._paused:
                self._start_batch(self.started + 1, snapshot, step)

    def _may_start(self) -> bool:
        sync = self._plan.sync
        has_slot = sync.style != "live" or len(self._in_flight) < sync.in_flight
        return self.fault is None and self.has_capacity() and has_slot

    async def _weights_for(self, number: int) -> tuple[Snapshot, int]:
        """Snapshot that samples batch `number`, and the step of its weights."""
        sync, offset = self._plan.sync, self._plan.staleness
        if sync.style == "fixed":
            self._current = await self._weights.at(sync.weights_for(number, offset))
        elif self._current is None:
            self._current = await self._weights.at(0)
        elif sync.style == "live":
            self._current = self._weights.newest()
        elif sync.refreshes_before(number, offset):
            await self._changes.until(lambda: not self._in_flight)
            self._current = await self._weights.newer(self._current.step)
        snapshot = LiveSnapshot(self._weights) if sync.style == "live" else self._current.snapshot
        return snapshot, self._current.step

    def _start_batch(self, number: int, snapshot: Snapshot, step: int) -> None:
        tasks = self._draw(number)
        task = asyncio.create_task(self._sample(number, tasks, snapshot, step), name=f"rollouts of step {number}")
        self.started, self._in_flight[number] = number, task
        task.add_done_callback(lambda _: self._changes.notify())

    def _draw(self, number: int) -> list[Task]:
        tasks = self._task_sampler.draw(self._plan.groups)
        self._cursors[number] = self._task_sampler.cursor
        return tasks

    async def _sample(self, number: int, tasks: Sequence[Task], snapshot: Snapshot, step: int) -> None:
        """Sample a batch, wait for all earlier ones, and hand it on."""
        refills, groups = 0, await self._roll_out(number, tasks, snapshot, ())
        while all(rollout.error for group in groups for rollout in group.rollouts):
            if refills >= self._runner.config.refills:
                raise _all_failed(number, groups, refills)
            refills += 1
            groups = await self._roll_out(number, self._draw(number), snapshot, (_RESAMPLE_STREAM, refills))
        groups, filter_refills = await self._refill(number, groups, snapshot)
        numbers = {"sync/weights": float(step), **({"rollouts/refills": float(refills)} if refills else {})}
        if self._plan.filter_refills:
            numbers["filters/refills"] = float(filter_refills)
        await self._changes.until(lambda: self.done == number - 1)
        await self._put(Batch(step=number, groups=groups, cursor=self._cursors.pop(number), numbers=numbers))
        self.done = number
        del self._in_flight[number]

    async def _refill(
        self, number: int, groups: tuple[Group, ...], snapshot: Snapshot
    ) -> tuple[tuple[Group, ...], int]:
        """Add groups of other tasks until the filters keep enough. Returns the number of refills too."""
        refills = 0
        while self._plan.filter_refills and (missing := self._missing(groups)):
            if refills >= self._plan.filter_refills:
                raise TinsmithError(
                    f"Step {number}: {missing}.",
                    "Raise filter_refills (0 takes what is left), loosen filters, or choose tasks of another "
                    "difficulty.",
                )
            refills += 1
            groups += await self._roll_out(number, self._draw(number), snapshot, (_REFILL_STREAM, refills))
        return groups, refills

    def _missing(self, groups: Sequence[Group]) -> str:
        """What the groups of a step lack; empty if they are enough."""
        plan = self._plan
        left = apply_filters(plan.filters, groups)
        if len(left) < plan.groups:
            return f"the filters keep {len(left)} of {len(groups)} groups, but a step needs {plan.groups}"
        if (partial := sum(map(plan.is_partial, left))) < plan.min_partial:
            return f"{partial} of {len(left)} groups are solved in part, but a step needs {plan.min_partial}"
        return ""

    async def _roll_out(
        self, number: int, tasks: Sequence[Task], snapshot: Snapshot, stream: tuple[int, ...]
    ) -> tuple[Group, ...]:
        seeds = [request_seed(self._plan.seed, number, group, *stream) for group in range(len(tasks))]
        over = self._runner.config.over if self._plan.sync.style != "fixed" else None
        return await self._runner.run_groups(
            self._workflow, tasks, snapshot, size=self._plan.size, seeds=seeds, over=over
        )


def _all_failed(number: int, groups: Sequence[Group], refills: int) -> TinsmithError:
    first = next(rollout.error for group in groups for rollout in group.rollouts)
    earlier = f" ({refills} earlier batches failed too)" if refills else ""
    return TinsmithError(
        f"Every rollout of step {number} failed; the first error: {first}{earlier}.",
        "Fix the cause; if it was transient, raise rollout.retries and rollout.refills.",
    )
