"""Batches of rollouts, begun ahead of the steps that train on them.

The sampling side of a run: it begins batch after batch as `sync.py` allows, hands them on in order, oldest first, and
throws none away. A batch in which every rollout failed is sampled anew a bounded number of times, then ends the run.
Leaves out how a group is tried (`tries.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tinsmith.errors import TinsmithError
from tinsmith.rl.data.tasks import TaskSampler
from tinsmith.rl.policy.base import Snapshot, request_seed
from tinsmith.rl.rollouts.filters import FilterConfig, apply_filters
from tinsmith.rl.rollouts.runner import RolloutRunner
from tinsmith.rl.rollouts.weight_sync import ChangeNotifier, LiveSnapshot, PublishedWeights, SyncConfig, WeightSource
from tinsmith.rl.types import Group, Task
from tinsmith.rl.workflows.base import Workflow

_REFILL = 2
"""Keeps the seeds of a batch that is sampled anew apart from all others."""

_FILL = 3
"""The same of groups in the place of those that filters leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups of one step.

    Example: Batch(step=3, groups=(group, group), cursor=48, numbers={"sync/weights": 2.0})
    """

    step: int
    """Its number, from 1; the step that trains on it, unless batches are used again or out of order."""
    groups: tuple[Group, ...]
    cursor: int = 0
    """Training tasks drawn when the last of its own was, those that others drew before among them."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What sampling has to tell of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """How much is sampled when.

    Example: SamplingPlan(steps=60, groups=16, size=8, staleness=0, seed=0, sync=SyncConfig())
    """

    steps: int | None
    """Batches to sample; None is as many as are asked for."""
    groups: int
    """Of each batch."""
    size: int
    """Rollouts of a group."""
    staleness: int
    seed: int
    sync: SyncConfig
    filters: tuple[FilterConfig, ...] = ()
    filter_refills: int = 0
    """Further batches at most, until filters leave as many groups as a batch has; 0 is to take what they leave."""


class BatchProducer:
    """Makes the batches of a run."""

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
        """`put` is handed each batch, in order; `bell` is rung when one is there."""
        self._workflow, self._deck, self._weights, self._plan = workflow, task_sampler, weights, plan
        self._runner, self._bell, self._put = runner, changes, put
        self._under_way: dict[int, asyncio.Task[None]] = {}
        self._cursors: dict[int, int] = {}
        self._producer: asyncio.Task[None] | None = None
        self._now: PublishedWeights | None = None
        self._held = False
        self.begun = self.done = 0
        """Numbers of the last batch begun, and of the last handed on."""
        self.room: Callable[[], bool] = lambda: True
        """Whether more batches are wanted than there are."""

    def go_on(self, done: int) -> None:
        """After batch `done`, of an earlier process."""
        self.begun = self.done = done

    def start(self) -> None:
        """Batches are begun from now on, also after `settle`."""
        self._held = False
        self._bell.ring()
        if self._producer is None:
            self._producer = asyncio.create_task(self._produce(), name="batches")
            self._producer.add_done_callback(lambda _: self._bell.ring())

    @property
    def fault(self) -> BaseException | None:
        """Why there will be no further batch."""
        tasks = [task for task in (*self._under_way.values(), self._producer) if task is not None and task.done()]
        return next((error for task in tasks if (error := task.exception()) is not None), None)

    @property
    def complete(self) -> bool:
        """Whether all batches are begun, or none will be any more."""
        return self.fault is not None or (self._producer is not None and self._producer.done())

    async def settle(self) -> None:
        """Begins nothing more, and returns when what is under way is handed on, or cannot be for a fault."""
        self._held = True
        while self.fault is None and self._under_way:
            await asyncio.wait(self._under_way.values(), return_when=asyncio.FIRST_COMPLETED)
        if self.fault is None:
            self.begun = self.done

    async def close(self) -> None:
        """Stops what is under way."""
        tasks = [task for task in (*self._under_way.values(), self._producer) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._under_way.clear()

    async def _produce(self) -> None:
        while self._plan.steps is None or self.begun < self._plan.steps:
            await self._bell.until(lambda: not self._held and self._may_begin())
            snapshot, step = await self._weights_for(self.begun + 1)
            if not self._held:
                self._begin(self.begun + 1, snapshot, step)

    def _may_begin(self) -> bool:
        sync = self._plan.sync
        return self.fault is None and self.room() and (sync.style != "live" or len(self._under_way) < sync.in_flight)

    async def _weights_for(self, number: int) -> tuple[Snapshot, int]:
        """What samples batch `number`, and the step it is of."""
        sync, offset = self._plan.sync, self._plan.staleness
        if sync.style == "fixed":
            self._now = await self._weights.at(sync.weights_for(number, offset))
        elif self._now is None:
            self._now = await self._weights.at(0)
        elif sync.style == "live":
            self._now = self._weights.newest()
            return LiveSnapshot(self._weights), self._now.step
        elif sync.turns(number, offset):
            await self._bell.until(lambda: not self._under_way)
            self._now = await self._weights.newer(self._now.step)
        return (LiveSnapshot(self._weights) if sync.style == "live" else self._now.snapshot), self._now.step

    def _begin(self, number: int, snapshot: Snapshot, step: int) -> None:
        tasks = self._draw(number)
        task = asyncio.create_task(self._batch(number, tasks, snapshot, step), name=f"rollouts of step {number}")
        self.begun, self._under_way[number] = number, task
        task.add_done_callback(lambda _: self._bell.ring())

    def _draw(self, number: int) -> list[Task]:
        tasks = self._deck.draw(self._plan.groups)
        self._cursors[number] = self._deck.cursor
        return tasks

    async def _batch(self, number: int, tasks: Sequence[Task], snapshot: Snapshot, step: int) -> None:
        """Samples, waits for its turn, and hands on."""
        refills, groups = 0, await self._roll(number, tasks, snapshot, ())
        while all(rollout.error for group in groups for rollout in group.rollouts):
            if refills >= self._runner.config.refills:
                raise _all_failed(number, groups, refills)
            refills += 1
            groups = await self._roll(number, self._draw(number), snapshot, (_REFILL, refills))
        groups, fills = await self._filled(number, groups, snapshot)
        numbers = {"sync/weights": float(step), **({"rollouts/refills": float(refills)} if refills else {})}
        if self._plan.filter_refills:
            numbers["filters/refills"] = float(fills)
        await self._bell.until(lambda: self.done == number - 1)
        await self._put(Batch(step=number, groups=groups, cursor=self._cursors.pop(number), numbers=numbers))
        self.done = number
        del self._under_way[number]

    async def _filled(
        self, number: int, groups: tuple[Group, ...], snapshot: Snapshot
    ) -> tuple[tuple[Group, ...], int]:
        """With groups of other tasks, until filters leave enough; and how many batches that took."""
        fills, plan = 0, self._plan
        while plan.filter_refills and (left := len(apply_filters(plan.filters, groups))) < plan.groups:
            if fills >= plan.filter_refills:
                raise TinsmithError(
                    f"Step {number}: of {len(groups)} groups filters leave {left}, and a step takes {plan.groups}.",
                    "Raise filter_refills (0 takes what is left), loosen filters, or take tasks that suit the policy.",
                )
            fills += 1
            groups += await self._roll(number, self._draw(number), snapshot, (_FILL, fills))
        return groups, fills

    async def _roll(
        self, number: int, tasks: Sequence[Task], snapshot: Snapshot, again: tuple[int, ...]
    ) -> tuple[Group, ...]:
        seeds = [request_seed(self._plan.seed, number, group, *again) for group in range(len(tasks))]
        over = self._runner.config.over if self._plan.sync.style != "fixed" else None
        return await self._runner.run_groups(
            self._workflow, tasks, snapshot, size=self._plan.size, seeds=seeds, over=over
        )


def _all_failed(number: int, groups: Sequence[Group], refills: int) -> TinsmithError:
    first = next(rollout.error for group in groups for rollout in group.rollouts)
    again = f" (and so did {refills} more batches before)" if refills else ""
    return TinsmithError(
        f"Every rollout of step {number} failed; the first: {first}{again}.",
        "Mend that, or raise rollout.retries and rollout.refills if it was only for a moment.",
    )
