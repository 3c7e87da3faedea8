"""The workflow protocol, and the scoring of rollouts.

A workflow turns a task into rollouts. It is created once per run and called for many tasks concurrently, so it keeps no
state between calls, and a cancelled call leaves none.
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
"""Name of the workflow's own reward among the reward parts."""


class Workflow(Protocol):
    """Creates the rollouts of a task. Created once per run and called for many tasks concurrently."""

    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        """Return `count` rollouts of a task. An exception fails all of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowContext:
    """The objects of a run that a workflow uses.

    Example: WorkflowContext(sampling=SamplingConfig(), rewards=Rewards([Number()]), agent_endpoint=AgentEndpoint())
    """

    sampling: SamplingConfig
    rewards: Rewards
    agent_endpoint: AgentEndpoint
    """OpenAI-compatible endpoint through which agents sample the policy."""


class WorkflowOptions(Settings):
    """Base class of workflow settings. A subclass implements `make`; its fields are settings of the run file.

    Example:

        @workflow("debate")
        class Debate(WorkflowOptions):
            rounds: int = 2

            def make(self, context: WorkflowContext) -> Workflow:
                return DebateWorkflow(self.rounds, context)
    """

    @property
    def provides_rewards(self) -> bool:
        """Whether the workflow gives rewards itself, so that the run needs none of its own."""
        return False

    @property
    def provides_states(self) -> bool:
        """Whether the turns of the workflow may have states, which some advantages compare."""
        return True

    def make(self, context: WorkflowContext) -> Workflow:
        """Create the workflow of a run."""
        raise NotImplementedError


def fail_if_not_finite(rollout: Rollout) -> Rollout:
    """Return the rollout, or a failed one if a reward is NaN or infinite: such rewards cannot be compared."""
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
    """Return a scored rollout of these turns. If a reward function raises, the rollout has failed.

    `own` is the workflow's own reward, a number or named numbers to add up; it is added to those of the run.
    """
    rollout = Rollout(turns=turns)
    try:
        total, parts = await rewards.score(task, rollout, policy)
    except Exception as error:  # noqa: BLE001  user code: the error is recorded with the rollout
        return replace(rollout, error=f"reward: {type(error).__name__}: {error}")
    if own is None and not parts and rewards.needed:
        return replace(rollout, error="reward: neither the workflow nor the run's rewards gave one")
    if own is not None:
        named = {f"{OWN}/{name}": float(value) for name, value in own.items()} if isinstance(own, Mapping) else {}
        value = sum(named.values()) if isinstance(own, Mapping) else float(own)
        total, parts = total + value, {OWN: value, **named, **parts}
    return replace(rollout, rewards={POLICY: total}, reward_parts=parts)
