"""Base class of the workflows: sample replies to a chat, then score each by what the policy believes."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from typing_extensions import override

from tinsmith.rl.guards.user_code import contained, describe
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.types import Rollout, Task, Trajectory, Turn
from tinsmith.rl.workflows.base import Workflow, WorkflowContext

Truth = TypeVar("Truth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reflection:
    """The score of a reply.

    Example: Reflection(reward=0.91, metrics={"delta/error": 0.09, "delta/truth": 0.5, "answered": 1.0})
    """

    reward: float
    correct: bool | None = None
    """Whether the answer is right, if the environment has right answers."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the metrics; see `rl/record/metrics.py` for errors and baselines."""


class ReflectionWorkflow(Workflow, Generic[Truth]):
    """Samples all replies to a task in one request. What is true of the task is measured once, by the same weights."""

    def __init__(self, context: WorkflowContext) -> None:
        self._sampling = context.sampling

    @override
    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        policy = policy.pinned()
        turns, truth = await asyncio.gather(
            policy.sample(task.messages, count=count, seed=seed, sampling=self._sampling), self.truth(task, policy)
        )
        return tuple(await asyncio.gather(*(self._rollout(task, turn, truth, policy) for turn in turns)))

    async def _rollout(self, task: Task, turn: Turn, truth: Truth, policy: Snapshot) -> Rollout:
        # A failed request is no bad answer: its rollout is dropped.
        score = await contained(self.score(task, turn.text, truth, policy), lambda error: f"reward: {describe(error)}")
        if isinstance(score, str):
            return Rollout.single((turn,)).failed(score)
        return Rollout(
            trajectories=(Trajectory(turns=(turn,), reward=score.reward),),
            reward_parts=score.parts,
            correct=score.correct,
            metrics=score.metrics,
        )

    @abstractmethod
    async def truth(self, task: Task, policy: Snapshot) -> Truth:
        """What is true of the task and these weights, whatever the replies are."""
        ...

    @abstractmethod
    async def score(self, task: Task, text: str, truth: Truth, policy: Snapshot) -> Reflection:
        """Score a reply. An exception fails its rollout."""
        ...
