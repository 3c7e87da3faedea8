"""Advantages that differ from token to token: returns over tokens, and generalized advantage estimation.

Left out: where values come from (a critic, `rl/critic.py`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from tinsmith.rl.algorithms.advantages.base import Advantage, Advantages, Traces, whiten


class ReinforcePlusPlus(Advantage):
    """R_t = r_t + gamma R_{t+1}, whitened over all tokens of the step (arXiv 2501.03262)."""

    type: Literal["reinforceplusplus"] = "reinforceplusplus"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from token to token."""

    def of(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """Token rewards: the rollout's on its last token, less penalties."""
        flat = whiten([discounted(trace.token_rewards, self.gamma) for traces_G in traces_PG for trace in traces_G])
        return _grouped(flat, traces_PG)


class Gae(Advantage):
    """delta_t = r_t + gamma V_{t+1} - V_t, A_t = sum (gamma lambda)^l delta_{t+l}, whitened (arXiv 1506.02438)."""

    type: Literal["gae"] = "gae"
    needs: ClassVar[frozenset[str]] = frozenset({"values"})
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from token to token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """1 is returns less values, 0 trusts the values alone."""
    whiten: bool = True
    """Over all tokens of the step."""

    def of(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """The value after the last token is 0."""
        flat = [self.raw(trace.token_rewards, trace.columns["values"]) for one in traces_PG for trace in one]
        return _grouped(whiten(flat) if self.whiten else flat, traces_PG)

    def raw(self, rewards_T: np.ndarray, values_T: np.ndarray) -> np.ndarray:
        """float64 [T], not whitened; with the values added, the returns that a critic learns."""
        after_T = np.append(values_T[1:], 0.0)
        return discounted(rewards_T + self.gamma * after_T - values_T, self.gamma * self.lam)


def discounted(values_T: np.ndarray, factor: float) -> np.ndarray:
    """sum_l factor^l x_{t+l}, float64 [T]."""
    found = np.empty(len(values_T))
    following = 0.0
    for at in range(len(values_T) - 1, -1, -1):
        following = float(values_T[at]) + factor * following
        found[at] = following
    return found


def _grouped(flat: list[np.ndarray], traces_PG: Traces) -> Advantages:
    rest = iter(flat)
    return [[next(rest) for _ in traces_G] for traces_G in traces_PG]
