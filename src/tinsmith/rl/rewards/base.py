"""What a reward is: a settings class that says what a rollout is worth. Most read the last reply's text alone."""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith.rl.policy.base import Snapshot
from tinsmith.rl.types import Rollout, Task
from tinsmith.settings import Settings

RewardValue = float | Mapping[str, float]
"""A number, or named parts that add up to it."""


class Reward(Settings):
    """What every reward has. One of your own has `score`, or `judge` where it reads more than the text."""

    weight: float = 1.0
    """Its share of the rollout's reward."""
    name: str = ""
    """Its name in reward parts and metrics; the type if empty."""

    @property
    def title(self) -> str:
        """Its name."""
        return self.name or str(type(self).model_fields["type"].default)

    def score(self, task: Task, text: str) -> RewardValue:
        """What a reply's text is worth."""
        raise NotImplementedError

    async def judge(self, task: Task, rollout: Rollout, policy: Snapshot) -> RewardValue:
        """What a rollout is worth; `policy` is who spoke, and knows whom else to ask (`peer`)."""
        return self.score(task, rollout.text)
