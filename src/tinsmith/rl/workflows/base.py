"""The workflow protocol, and the scoring of rollouts.

A workflow turns a task into rollouts. It is created once per run and called for many tasks concurrently, so it keeps no
state between calls, and a cancelled call leaves none.
"""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from typing_extensions import override

from tinsmith.rl.guards.user_code import describe, is_fault, run_user_code
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.sampling import SamplingConfig, Snapshot, request_seed
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rewards.base import RewardValue, Score, all_correct
from tinsmith.rl.types import POLICY, Rollout, Task, Trajectory, Turn
from tinsmith.settings import Settings

OWN = "workflow"
"""Name of the workflow's own reward among the reward parts."""

NO_REWARD = "reward: neither the workflow nor the run's rewards gave one"


class Workflow(Protocol):
    """Creates the rollouts of a task. Created once per run and called for many tasks concurrently."""

    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        """Return `count` rollouts of a task. An exception fails all of them."""
        ...


class IndependentRollouts(Workflow):
    """Base class of workflows that make each rollout by itself; the rollouts of a task run concurrently."""

    @override
    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        seeds = (request_seed(seed, index) for index in range(count))
        return tuple(await asyncio.gather(*(self._contained(task, policy, each) for each in seeds)))

    async def _contained(self, task: Task, policy: Snapshot, seed: int) -> Rollout:
        try:
            return await run_user_code(self.rollout(task, policy, seed))
        except BaseException as error:
            if not is_fault(error):
                raise
            return Rollout(error=describe(error), termination="error")

    @abstractmethod
    async def rollout(self, task: Task, policy: Snapshot, seed: int) -> Rollout:
        """Return one rollout of a task. An exception fails it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowContext:
    """The objects of a run that a workflow uses.

    Example: WorkflowContext(sampling=SamplingConfig(), rewards=Rewards([Number()]), agent_endpoint=AgentEndpoint())
    """

    sampling: SamplingConfig
    rewards: Rewards
    """Reward functions of the environment."""
    agent_endpoint: AgentEndpoint
    """OpenAI-compatible endpoint through which agents sample the policy."""
    store: dict[str, Any] = field(default_factory=dict)
    """Values that all rollouts of the run share; checkpoints save those that JSON can hold."""
    evaluating: bool = False
    """Whether the rollouts are those of an evaluation."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """What the environments of the run have opened, by name."""


class WorkflowOptions(Settings):
    """Base class of workflow settings. A subclass implements `make`; its fields are settings of the run file.

    Example:

        @workflow("debate")
        class Debate(WorkflowOptions):
            rounds: int = 2

            def make(self, context: WorkflowContext) -> Workflow:
                return DebateWorkflow(self.rounds, context)
    """

    has_tasks: ClassVar[bool] = False
    """Whether the class brings tasks too, and so is an entry of `environments`."""

    @property
    def provides_rewards(self) -> bool:
        """Whether rollouts have a reward, so that the run needs none of its own."""
        return False

    @property
    def provides_states(self) -> bool:
        """Whether turns may have states, which some advantages compare."""
        return True

    def make(self, context: WorkflowContext) -> Workflow:
        """Create the workflow of a run; `context` has the sampling settings of its environment."""
        raise NotImplementedError


class AdaptedWorkflow:
    """Base class of workflows in the API of another system: `{type: custom, path: …}` takes a subclass or an object."""

    @classmethod
    def workflow_options(cls, args: Mapping[str, Any]) -> WorkflowOptions:
        """The settings that run it with these arguments. Raises ValueError if it does not take them."""
        raise NotImplementedError


def fail_if_not_finite(rollout: Rollout) -> Rollout:
    """Return the rollout, or a failed one if a reward is NaN or infinite: such rewards cannot be compared."""
    turns = [(f"turn {number}", turn.reward) for number, turn in enumerate(rollout.turns, 1) if turn.reward is not None]
    rewards = [(f"the reward of {each.role}", each.reward) for each in rollout.trajectories]
    if rollout.error or all(math.isfinite(value) for _, value in (*rewards, *turns)):
        return rollout
    named = (*rollout.reward_parts.items(), *turns, *rewards)
    wrong = next(f"{name} is {value}" for name, value in named if not math.isfinite(value))
    return rollout.failed(f"reward: {wrong}, and must be a finite number")


def note_truncation(rollout: Rollout) -> Rollout:
    """The rollout, with termination `max_response` if it was done but a trajectory ended at max_tokens."""
    truncated = rollout.termination == "done" and any(each.truncated for each in rollout.trajectories)
    return replace(rollout, termination="max_response") if truncated and not rollout.error else rollout


async def score_turns(
    task: Task, turns: tuple[Turn, ...], rewards: Rewards, policy: Snapshot, own: RewardValue | None = None
) -> Rollout:
    """Return a scored rollout of these turns, which are one trajectory. If a reward raises, the rollout has failed.

    `own` is the workflow's own reward; it is added to those of the run.
    """
    rollout = Rollout.single(turns)
    (trajectory,) = rollout.trajectories
    try:
        score = await rewards.score(task, trajectory, policy)
    except BaseException as error:
        if not is_fault(error):
            raise
        return rollout.failed(f"reward: {describe(error)}")
    if own is None and not score.parts and rewards.needed:
        return rollout.failed(NO_REWARD)
    parts, correct, total = score.parts, score.correct, score.value
    if own is not None:
        try:
            added = Score.of(own)
        except (TypeError, ValueError, OverflowError) as error:
            return rollout.failed(f"the workflow's own {error}")
        named = {f"{OWN}/{name}": value for name, value in added.parts.items()}
        total, parts = total + added.value, {OWN: added.value, **named, **parts}
        correct = all_correct((correct, added.correct))
    return Rollout.single(turns, total, reward_parts=parts, correct=correct)


async def add_rewards(task: Task, rollout: Rollout, rewards: Rewards, policy: Snapshot) -> Rollout:
    """Add the run's rewards to the trajectories of a rollout that a workflow returned with its own rewards.

    Their parts are recorded by role. A `correct` of the workflow counts more than those of the rewards.
    """
    scores: list[tuple[Trajectory, Score]] = []
    try:
        for trajectory in rollout.trajectories:
            scores.append((trajectory, await rewards.score(task, trajectory, policy)))
    except BaseException as error:
        if not is_fault(error):
            raise
        return rollout.failed(f"reward: {describe(error)}")
    parts = dict(rollout.reward_parts)
    for role in rollout.roles:
        of_role = [score.parts for trajectory, score in scores if trajectory.role == role]
        for name in dict.fromkeys(name for part in of_role for name in part):
            values = [part[name] for part in of_role if name in part]
            parts[name if role == POLICY else f"{role}/{name}"] = sum(values) / len(values)
    correct = all_correct(score.correct for _, score in scores) if rollout.correct is None else rollout.correct
    trajectories = tuple(replace(each, reward=each.reward + score.value) for each, score in scores)
    return replace(rollout, trajectories=trajectories, reward_parts=parts, correct=correct)
