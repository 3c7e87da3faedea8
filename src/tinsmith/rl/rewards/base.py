"""The base class of reward functions. Most rewards read only the text of the last reply."""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith.rl.policy.base import Snapshot
from tinsmith.rl.types import Rollout, Task
from tinsmith.settings import Settings

RewardValue = float | Mapping[str, float]
"""A number, or a mapping of named parts whose sum is the reward."""


class Reward(Settings):
    """Base class of reward functions. A subclass implements `score`, or `judge` if it needs more than the reply's text.

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

    @property
    def title(self) -> str:
        """The name in metrics: `name`, else the type."""
        return self.name or str(type(self).model_fields["type"].default)

    def score(self, task: Task, text: str) -> RewardValue:
        """Return the reward of a reply, given its text. An exception marks the rollout as failed."""
        raise NotImplementedError

    async def judge(self, task: Task, rollout: Rollout, policy: Snapshot) -> RewardValue:
        """Return the reward of a rollout; by default the score of its last reply.

        `policy` is the policy that sampled the rollout; `policy.open_model` gives access to other models of its server.
        """
        return self.score(task, rollout.text)
