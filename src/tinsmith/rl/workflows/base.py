"""What a workflow is: how one task becomes rollouts. And how replies are scored, a failing score being data."""

from __future__ import annotations

from typing import Protocol

from tinsmith.rl.policy import Snapshot
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.types import POLICY, Rollout, Task, Turn


class Workflow(Protocol):
    """Made once for a run; called for many tasks at once."""

    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        """`count` rollouts of one task. Whatever it raises makes all of them failed ones."""
        ...


class Unasked:
    """The workflow of a run that asks nothing."""

    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        """Nobody calls it."""
        raise AssertionError("this run asks nothing")


def scored(task: Task, turns: tuple[Turn, ...], rewards: Rewards) -> Rollout:
    """A rollout worth what its last turn says."""
    try:
        reward, parts = rewards.score(task, turns[-1].text)
    except Exception as error:  # noqa: BLE001  rewards are users' code; the fault is theirs and is kept with the rollout
        return Rollout(turns=turns, error=f"reward: {type(error).__name__}: {error}")
    return Rollout(turns=turns, rewards={POLICY: reward}, reward_parts=parts)
