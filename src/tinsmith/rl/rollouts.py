"""Groups of rollouts, run side by side, and begun ahead of the step that trains on them.

Bounded staleness is one number S: when step t asks for its batch, batches t to t + S are under way, each with the
weights of the step that began it. So S = 0 is synchronous, with S = 1 the next batch is sampled while this one is
trained on, and no batch is trained on by weights more than S updates newer. Batches are used in order, oldest first;
none is thrown away. A rollout that fails is data; a batch in which all fail ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith.errors import TinsmithError
from tinsmith.rl.policy import Policy, Snapshot, request_seed
from tinsmith.rl.tasks import Deck
from tinsmith.rl.types import Group, Rollout, Task
from tinsmith.rl.workflows.base import Workflow


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups that one step trains on.

    Example: Batch(step=3, groups=(group, group))
    """

    step: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is sampled when.

    Example: Plan(steps=60, groups=16, size=8, staleness=0, seed=0)
    """

    steps: int
    groups: int
    """For each step."""
    size: int
    """Rollouts of a group."""
    staleness: int
    seed: int


async def roll(
    workflow: Workflow,
    tasks: Sequence[Task],
    policy: Snapshot,
    *,
    size: int,
    seeds: Sequence[int],
    gate: asyncio.Semaphore,
) -> tuple[Group, ...]:
    """A group for each task, at most `gate` of them at a time."""

    async def one(task: Task, seed: int) -> tuple[Rollout, ...]:
        async with gate:
            return await workflow.run(task, policy, count=size, seed=seed)

    results = await asyncio.gather(*map(one, tasks, seeds), return_exceptions=True)
    return tuple(
        Group(
            task=task,
            rollouts=_failed(result, size) if isinstance(result, BaseException) else result,
            version=policy.version,
        )
        for task, result in zip(tasks, results, strict=True)
    )


class Rollouts:
    """The batches of a run."""

    def __init__(self, workflow: Workflow, deck: Deck, policy: Policy, plan: Plan, gate: asyncio.Semaphore) -> None:
        self._workflow, self._deck, self._policy, self._plan, self._gate = workflow, deck, policy, plan, gate
        self._under_way: dict[int, asyncio.Task[tuple[Group, ...]]] = {}
        self._done: dict[int, tuple[Group, ...]] = {}

    async def next(self, step: int) -> tuple[Group, ...]:
        """The batch of `step`. Raises TinsmithError where none of its rollouts succeeded."""
        for ahead in range(step, min(step + self._plan.staleness, self._plan.steps) + 1):
            if ahead not in self._under_way and ahead not in self._done:
                await self._begin(ahead)
        groups = self._done.pop(step) if step in self._done else await self._under_way.pop(step)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if all(rollout.error for rollout in rollouts):
            raise TinsmithError(f"Every rollout of step {step} failed; the first: {rollouts[0].error}")
        return groups

    async def settle(self) -> tuple[Batch, ...]:
        """Waits for what is under way; returns the batches not yet trained on, oldest first."""
        for step in sorted(self._under_way):
            self._done[step] = await self._under_way.pop(step)
        return tuple(Batch(step=step, groups=self._done[step]) for step in sorted(self._done))

    def restore(self, batches: Sequence[Batch]) -> None:
        """What `settle` returned in an earlier process."""
        self._done = {batch.step: batch.groups for batch in batches}

    async def close(self) -> None:
        """Stops what is under way."""
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        self._under_way.clear()

    async def _begin(self, step: int) -> None:
        tasks = self._deck.draw(self._plan.groups)
        seeds = [request_seed(self._plan.seed, step, group) for group in range(len(tasks))]
        snapshot = await self._policy.snapshot()
        rolling = roll(self._workflow, tasks, snapshot, size=self._plan.size, seeds=seeds, gate=self._gate)
        self._under_way[step] = asyncio.create_task(rolling, name=f"rollouts of step {step}")


def _failed(error: BaseException, size: int) -> tuple[Rollout, ...]:
    if isinstance(error, asyncio.CancelledError):
        raise error
    return (Rollout(error=f"{type(error).__name__}: {error}"),) * size
