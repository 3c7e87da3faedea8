"""Reward functions. Each one is a settings class; a run file lists those of the run.

The reward of a rollout is their weighted sum. Each reward is also recorded by name, before its weight. A reward that
raises marks the rollout as failed, with the error; it does not stop the run.

Example: Closeness().score(task_with_answer_52, "50") == 0.5 * (1 - 2 / 52)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from tinsmith.errors import ConfigError
from tinsmith.rl.policy.base import Snapshot
from tinsmith.rl.rewards.base import Reward
from tinsmith.rl.rewards.countdown import Countdown
from tinsmith.rl.rewards.custom import CustomReward
from tinsmith.rl.rewards.format import Format, Overlong
from tinsmith.rl.rewards.gym import ReasoningGymScore
from tinsmith.rl.rewards.judge import Judge
from tinsmith.rl.rewards.mathematics import Math, MathBoxed, MathVerify
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
    """The reward functions of a run, by name. A run may have none."""

    def __init__(self, configs: Sequence[Reward], *, needed: bool = True) -> None:
        """Raise ConfigError if two rewards share a name. With `needed`, a rollout without any reward has failed."""
        self.needed = needed
        self._parts = {config.title: config for config in configs}
        if len(self._parts) < len(configs):
            raise ConfigError("rewards: two rewards have the same name.", "Set a different name: on each of them.")

    async def score(self, task: Task, rollout: Rollout, policy: Snapshot) -> tuple[float, dict[str, float]]:
        """Return the weighted sum, and each reward before its weight.

        A reward that consists of named parts is recorded as NAME, their sum, and NAME/PART.
        """
        total, parts = 0.0, dict[str, float]()
        for name, config in self._parts.items():
            value = await config.judge(task, rollout, policy)
            if isinstance(value, Mapping):
                parts |= {f"{name}/{part}": float(part_value) for part, part_value in value.items()}
                value = sum(value.values())
            parts[name] = float(value)
            total += config.weight * parts[name]
        return total, parts
