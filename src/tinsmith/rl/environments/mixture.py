"""A mixture of environments: the sampler that draws an environment for each group, and the workflow of its tasks.

Each environment has its own tasks, in its own order, and its own position in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from typing_extensions import override

from tinsmith.rl.data.tasks import HeldOutTasks, TaskSampler
from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.policy.sampling import SamplingConfig, Snapshot
from tinsmith.rl.types import Group, Rollout, Task
from tinsmith.rl.workflows.base import Workflow, WorkflowContext
from tinsmith.rl.workflows.group_scoring import GroupScoring

_STREAM = 4
"""Separates the random numbers of the mixture from those of task orders."""
_GOLDEN_RATIO = (5**0.5 - 1) / 2
_REMEMBERED_SKIPS = 1000
"""Newest draws that skipped held-out tasks to remember: more than there are draws of batches in flight."""


class EnvironmentOrder:
    """The environment of every draw, a function of the seed and the number of the draw.

    Draws are in blocks, of as many as a step has groups. A block has w * size draws of an environment with the share
    w, rounded down or up, in random order; the roundings cancel out over blocks (systematic sampling, with offsets
    that follow the golden ratio).
    """

    def __init__(self, weights: Mapping[str, float], seed: int, block_size: int) -> None:
        """`weights` are positive."""
        self._names, self._seed, self._size = tuple(weights), seed, block_size
        shares = np.array(list(weights.values()), np.float64)
        self._bounds = np.cumsum(shares / shares.sum())
        self._start = float(np.random.default_rng((seed, _STREAM)).random())

    def names(self, begin: int, end: int) -> list[str]:
        """Environments of the draws `begin` to `end` - 1, counted from 0; none if `end` is not after `begin`."""
        if end <= begin:
            return []
        blocks = range(begin // self._size, -(-end // self._size))
        names = [name for block in blocks for name in self._block(block)]
        skipped = begin - blocks.start * self._size
        return names[skipped : skipped + end - begin]

    def _block(self, number: int) -> list[str]:
        offset = (self._start + number * _GOLDEN_RATIO) % 1.0
        points = (np.arange(self._size) + offset) / self._size
        chosen = np.searchsorted(self._bounds[:-1], points, side="right")
        shuffled = np.random.default_rng((self._seed, _STREAM, number)).permutation(chosen)
        return [self._names[index] for index in shuffled]


class MixtureSampler(TaskSampler):
    """Draws each task from an environment, by weight. Environments keep their own positions and orders."""

    def __init__(self, samplers: Mapping[str, TaskSampler], order: EnvironmentOrder) -> None:
        self._samplers, self._order = dict(samplers), order
        self._skips: list[tuple[int, str, int]] = []
        self.cursor = 0

    @property
    @override
    def size(self) -> int:
        return sum(sampler.size for sampler in self._samplers.values())

    @property
    @override
    def examples(self) -> list[Task]:
        return [task for sampler in self._samplers.values() for task in sampler.examples]

    @override
    def draw(self, count: int) -> list[Task]:
        names = self._order.names(self.cursor, self.cursor + count)
        self.cursor += count
        drawn = {name: iter(self._draw_from(name, number)) for name, number in Counter(names).items()}
        return [replace(next(drawn[name]), environment=name) for name in names]

    def _draw_from(self, name: str, count: int) -> list[Task]:
        sampler = self._samplers[name]
        before = sampler.cursor
        tasks = sampler.draw(count)
        if skipped := sampler.cursor - before - count:
            self._skips = [*self._skips, (self.cursor, name, skipped)][-_REMEMBERED_SKIPS:]
        return tasks

    @override
    def update(self, groups: Sequence[Group]) -> None:
        for name, sampler in self._samplers.items():
            sampler.update([group for group in groups if group.task.environment == name])

    @property
    @override
    def state(self) -> dict[str, Any]:
        """Positions and orders of all environments after `drawn` draws."""
        environments = {
            name: {"cursor": sampler.cursor, "order": sampler.state} for name, sampler in self._samplers.items()
        }
        return {"environments": environments, "drawn": self.cursor, "skips": self._skips}

    @override
    def restore(self, cursor: int, state: Mapping[str, Any]) -> None:
        """`cursor` may be before that of `state`: then later draws are made again. Without a state, positions are
        derived from the cursor."""
        self.cursor, drawn = cursor, state.get("drawn", 0)
        self._skips = [(at, name, count) for at, name, count in state.get("skips", ()) if at <= cursor]
        later = Counter(self._order.names(cursor, drawn))
        for at, name, count in state.get("skips", ()):
            later[name] += count if at > cursor else 0
        ahead = Counter(self._order.names(drawn, cursor))
        for name, sampler in self._samplers.items():
            saved = state.get("environments", {}).get(name, {})
            sampler.restore(saved.get("cursor", 0) - later[name] + ahead[name], saved.get("order", {}))


class MixtureWorkflow(GroupScoring):
    """Passes each task to the workflow of its environment."""

    def __init__(self, workflows: Mapping[str, Workflow]) -> None:
        self._workflows = dict(workflows)

    @override
    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        return await self._workflows[task.environment].run(task, policy, count=count, seed=seed)

    @override
    def scores_group(self, task: Task) -> bool:
        return isinstance(self._workflows[task.environment], GroupScoring)

    @override
    async def score_group(
        self, task: Task, rollouts: Sequence[Rollout], policy: Snapshot, *, seed: int
    ) -> tuple[Rollout, ...]:
        workflow = self._workflows[task.environment]
        if not isinstance(workflow, GroupScoring):
            return tuple(rollouts)
        return await workflow.score_group(task, rollouts, policy, seed=seed)


def mixture_workflow(
    environments: Sequence[EnvironmentOptions], sampling: SamplingConfig, context: WorkflowContext
) -> MixtureWorkflow:
    """The workflow of the tasks of all these environments. `sampling` is that of the run."""
    return MixtureWorkflow(
        {each.title: each.make(replace(context, sampling=each.sampling_of(sampling))) for each in environments}
    )


def split_environments(
    environments: Sequence[EnvironmentOptions], seed: int, groups: int, *, train: bool
) -> tuple[MixtureSampler, HeldOutTasks]:
    """Sampler of the training tasks of all environments with a weight, and the held-out tasks of each environment, or,
    without environments of a name, of each source.

    `groups`: groups of a step. Without `train`, no training tasks are loaded.
    """
    samplers, held_out = dict[str, TaskSampler](), dict[str, tuple[Task, ...]]()
    for environment in environments:
        sampler, split = environment.split_by_source(seed, train=train and environment.weight > 0)
        if sampler is not None:
            samplers[environment.title] = sampler
        for source, tasks in split.items():
            named = tuple(replace(task, environment=environment.title) for task in tasks)
            held_out[environment.title or source] = named
    weights = {each.title: each.weight for each in environments if each.title in samplers}
    return MixtureSampler(samplers, EnvironmentOrder(weights, seed, groups)), held_out
