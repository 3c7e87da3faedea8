"""Advantages that compare rewards over the whole step: one value for all tokens of a trajectory."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from tinsmith.rl.algorithms.advantages.base import Advantage, Advantages, Traces, broadcast, net_rewards


class ReinforcePlusPlusBaselineAdvantage(Advantage):
    """(r - mean of the group) / (standard deviation of all these differences + epsilon) (arXiv 2501.03262).

    The deviation is the population's, over all groups of the step. In a group of one, the difference is 0.
    """

    type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""

    @property
    @override
    def of_groups(self) -> bool:
        return False

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        rewards_PG = [net_rewards(traces_G) for traces_G in traces_PG]
        centred_PG = [rewards_G - rewards_G.mean() if len(rewards_G) else rewards_G for rewards_G in rewards_PG]
        scale = _population_std(centred_PG) + self.epsilon
        return [
            broadcast(traces_G, centred_G / scale) for traces_G, centred_G in zip(traces_PG, centred_PG, strict=True)
        ]


class PrpoAdvantage(Advantage):
    """(r - mean) / (standard deviation + epsilon), both over all rewards of the step, without groups.

    The deviation is the population's.
    """

    type: Literal["prpo"] = "prpo"
    compares: ClassVar[bool] = False
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""

    @property
    @override
    def of_groups(self) -> bool:
        return False

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        rewards_PG = [net_rewards(traces_G) for traces_G in traces_PG]
        all_rewards = np.concatenate([np.zeros(0), *rewards_PG])
        mean = float(all_rewards.mean()) if len(all_rewards) else 0.0
        scale = _population_std(rewards_PG) + self.epsilon
        return [
            broadcast(traces_G, (rewards_G - mean) / scale)
            for traces_G, rewards_G in zip(traces_PG, rewards_PG, strict=True)
        ]


def _population_std(values_PG: list[np.ndarray]) -> float:
    """Standard deviation (divided by n) over all groups; 0 without values."""
    values = np.concatenate([np.zeros(0), *values_PG])
    return float(values.std()) if len(values) else 0.0
