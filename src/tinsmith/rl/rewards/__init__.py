"""What an answer is worth. Each reward is a settings class; a run lists its own.

The reward of a rollout is their weighted sum, and each part is kept by name. A reward that raises makes the rollout a
failed one, with the reason; it never stops a run.

Example: Closeness().score(task_with_answer_52, "50") == 0.5 * (1 - 2 / 52)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from tinsmith.errors import ConfigError
from tinsmith.rl.policy.base import Snapshot
from tinsmith.rl.rewards.base import Reward
from tinsmith.rl.rewards.custom import CustomReward
from tinsmith.rl.rewards.format import Format, Overlong
from tinsmith.rl.rewards.gym import ReasoningGymScore
from tinsmith.rl.rewards.judge import Judge
from tinsmith.rl.rewards.mathematics import Countdown, Math, MathBoxed, MathVerify
from tinsmith.rl.rewards.numbers import Closeness, Marked, Number
from tinsmith.rl.types import Rollout, Task

__all__ = ["Reward", "RewardConfig", "Rewards"]

RewardConfig = Annotated[
    Number
    | Closeness
    | Marked
    | MathVerify
    | Math
    | MathBoxed
    | Countdown
    | Format
    | Overlong
    | ReasoningGymScore
    | Judge
    | CustomReward,
    Field(discriminator="type"),
]


class Rewards:
    """The rewards of a run under their names; there may be none."""

    def __init__(self, configs: Sequence[Reward], *, needed: bool = True) -> None:
        """`needed`: whether a rollout that nobody gives a reward has failed. Raises ConfigError for two of one name."""
        self.needed = needed
        self._parts = {config.title: config for config in configs}
        if len(self._parts) < len(configs):
            raise ConfigError("rewards: each needs a name of its own.", "Set name: on them.")

    async def score(self, task: Task, rollout: Rollout, policy: Snapshot) -> tuple[float, dict[str, float]]:
        """The weighted sum, and its parts before weighting; a reward of several parts has NAME and NAME/PART."""
        total, parts = 0.0, dict[str, float]()
        for name, config in self._parts.items():
            worth = await config.judge(task, rollout, policy)
            if isinstance(worth, Mapping):
                parts |= {f"{name}/{part}": float(value) for part, value in worth.items()}
                worth = sum(worth.values())
            parts[name] = float(worth)
            total += config.weight * parts[name]
        return total, parts
