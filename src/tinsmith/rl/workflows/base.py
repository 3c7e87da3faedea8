"""What a workflow is: how one task becomes rollouts. And how rollouts are scored, a failing score being data.

A workflow is made once for a run and called for many tasks at once: it keeps nothing between calls, and a call that is
cancelled leaves no state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.base import SamplingConfig, Snapshot
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.types import POLICY, Rollout, Task, Turn
from tinsmith.settings import Settings

OWN = "workflow"
"""The name, among reward parts, of what the workflow itself gave."""


class Workflow(Protocol):
    """Made once for a run; called for many tasks at once."""

    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        """`count` rollouts of one task. Whatever it raises makes all of them failed ones."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowContext:
    """What a workflow is made with.

    Example: WorkflowContext(sampling=SamplingConfig(), rewards=Rewards([Number()]), agent_endpoint=AgentEndpoint())
    """

    sampling: SamplingConfig
    rewards: Rewards
    agent_endpoint: AgentEndpoint
    """Where agents reach the policy."""


class WorkflowOptions(Settings):
    """What every workflow's settings have."""

    @property
    def provides_rewards(self) -> bool:
        """Whether a run may do without rewards of its own."""
        return False

    @property
    def provides_states(self) -> bool:
        """Whether its turns may have states."""
        return True

    def make(self, parts: WorkflowContext) -> Workflow:
        """The workflow."""
        raise NotImplementedError


def fail_if_not_finite(rollout: Rollout) -> Rollout:
    """The same; a failed one where a reward is no number, or infinite: nothing could be compared with it."""
    turns = {f"turn {number}": turn.reward for number, turn in enumerate(rollout.turns, 1) if turn.reward is not None}
    if rollout.error or all(map(math.isfinite, (*rollout.rewards.values(), *turns.values()))):
        return rollout
    named = {**rollout.reward_parts, **turns, **rollout.rewards}
    wrong = next(f"{name} is {value}" for name, value in named.items() if not math.isfinite(value))
    return Rollout(turns=rollout.turns, error=f"reward: {wrong}, and must be a finite number")


async def score_turns(
    task: Task,
    turns: tuple[Turn, ...],
    rewards: Rewards,
    policy: Snapshot,
    own: float | Mapping[str, Any] | None = None,
) -> Rollout:
    """A rollout worth what rewards say of it, and what the workflow itself gave: a number, or named ones to add up."""
    rollout = Rollout(turns=turns)
    try:
        total, parts = await rewards.score(task, rollout, policy)
    except Exception as error:  # noqa: BLE001  rewards are users' code; the fault is theirs and is kept with the rollout
        return replace(rollout, error=f"reward: {type(error).__name__}: {error}")
    if own is None and not parts and rewards.needed:
        return replace(rollout, error="reward: neither the workflow nor the run's rewards gave one")
    if own is not None:
        named = {f"{OWN}/{name}": float(value) for name, value in own.items()} if isinstance(own, Mapping) else {}
        value = sum(named.values()) if isinstance(own, Mapping) else float(own)
        total, parts = total + value, {OWN: value, **named, **parts}
    return replace(rollout, rewards={POLICY: total}, reward_parts=parts)
