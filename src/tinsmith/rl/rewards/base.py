"""The base class of reward functions. Most rewards read only the text of the last reply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.types import Rollout, Task
from tinsmith.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward, and whether the rollout is right.

    Example: Score(value=0.9, correct=True, parts={"accuracy": 1.0, "format": -0.1})
    """

    value: float
    correct: bool | None = None
    """Whether the rollout is right, as pass@k counts it; None if this reward does not say."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts, for the metrics."""

    @classmethod
    def of(cls, value: RewardValue) -> Score:
        """The score of what a reward function returned; parts add up."""
        if isinstance(value, Score):
            return value
        if isinstance(value, Mapping):
            parts = {str(name): as_number(part, f"part {name}") for name, part in value.items()}
            return cls(value=sum(parts.values()), parts=parts)
        return cls(value=as_number(value, "reward"))


def as_number(value: object, name: str) -> float:
    """The value as a float. Raises TypeError or ValueError, with `name`, for what is no single real number."""
    if type(value) is float:
        return value
    if isinstance(value, str | bytes | complex) or np.size(cast(Any, value)) != 1:
        raise TypeError(f"{name} is a {type(value).__name__}, and must be a number")
    try:
        return float(cast(Any, value))
    except TypeError as error:
        raise TypeError(f"{name} is a {type(value).__name__}, and must be a number") from error


RewardValue = float | Mapping[str, float] | Score
"""A number, a mapping of named parts whose sum is the reward, or a Score, which can say what is right."""


def all_correct(verdicts: Iterable[bool | None]) -> bool | None:
    """False if one of them is, else True if one of them is, else None."""
    stated = [verdict for verdict in verdicts if verdict is not None]
    return all(stated) if stated else None


class Reward(Settings):
    """Base class of reward functions. A subclass implements `score`, or `judge` if it needs more than the reply's text,
    or `judge_group` to compare the replies of a group.

    The fields of a subclass are its settings in the run file.

    Example:

        @reward("short")
        class Short(Reward):
            limit: int = 80

            def score(self, task: Task, text: str) -> float:
                return 1.0 if len(text) <= self.limit else 0.0
    """

    weight: float = 1.0
    """Factor of this reward in the weighted sum. With 0 it is only a metric."""
    name: str = ""
    """Name in metrics and in the recorded rewards. Empty: the type."""
    role: str = ""
    """Role of the workflow whose trajectories are scored; empty: all roles."""

    @property
    def title(self) -> str:
        """The name in metrics: `name`, else the type."""
        return self.name or str(type(self).model_fields["type"].default)

    @property
    def says_correct(self) -> bool:
        """Whether every score of this reward says what is right."""
        return False

    @property
    def of_group(self) -> bool:
        """Whether the reward scores the replies of a group together, by `judge_group`."""
        return type(self).judge_group is not Reward.judge_group

    def read_answer(self, task: Task, text: str) -> str:
        """The answer as this reward reads it from a reply; empty if it reads none."""
        return ""

    def score(self, task: Task, text: str) -> RewardValue:
        """Return the reward of a reply, given its text. An exception marks the rollout as failed."""
        raise NotImplementedError

    async def judge(self, task: Task, rollout: Rollout, policy: Snapshot) -> RewardValue:
        """Return the reward of a rollout; by default the score of its last reply.

        `policy` is the policy that sampled the rollout; `policy.open_model` gives access to other models of its server.
        """
        return self.score(task, rollout.text)

    async def judge_group(
        self, task: Task, rollouts: Sequence[Rollout], policy: Snapshot, seed: int
    ) -> Sequence[RewardValue]:
        """Return the rewards of the rollouts of a group that did not fail. An exception marks all of them as failed.

        `seed` is that of the group, for random choices.
        """
        raise NotImplementedError
