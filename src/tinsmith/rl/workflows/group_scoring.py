"""Workflows whose rollouts are scored twice: each by itself, and all those of a group by rewards that compare them."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.types import Rollout, Task
from tinsmith.rl.workflows.base import Workflow
from tinsmith.rl.workflows.scoring import scored_group


class GroupScoring(Workflow):
    """Base class of workflows that score a group once all its rollouts are made."""

    def scores_group(self, task: Task) -> bool:
        """Whether a reward compares the rollouts of the task."""
        raise NotImplementedError

    async def score_group(
        self, task: Task, rollouts: Sequence[Rollout], policy: Snapshot, *, seed: int
    ) -> tuple[Rollout, ...]:
        """The rollouts of a group, failed ones among them, with the rewards that compare them."""
        raise NotImplementedError


class GroupScoredWorkflow(GroupScoring):
    """A workflow with the rewards of its environment that compare a group."""

    def __init__(self, workflow: Workflow, rewards: Rewards) -> None:
        self._workflow, self._rewards = workflow, rewards

    @override
    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        return await self._workflow.run(task, policy, count=count, seed=seed)

    @override
    def scores_group(self, task: Task) -> bool:
        return True

    @override
    async def score_group(
        self, task: Task, rollouts: Sequence[Rollout], policy: Snapshot, *, seed: int
    ) -> tuple[Rollout, ...]:
        return await scored_group(task, rollouts, self._rewards, policy, seed)
