"""Advantages that differ from token to token: returns over tokens, and generalized advantage estimation.

Left out: where values come from (a critic, `rl/algorithms/critic.py`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from tinsmith.rl.algorithms.advantages.base import Advantage, Advantages, Trace, Traces, whiten


class ReinforcePlusPlusAdvantage(Advantage):
    """R_t = r_t + gamma R_{t+1}, whitened over all tokens of the step (arXiv 2501.03262)."""

    type: Literal["reinforceplusplus"] = "reinforceplusplus"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from token to token."""

    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """Token rewards: the rollout's on its last token, less penalties."""
        flat = whiten([discounted(trace.token_rewards, self.gamma) for traces_G in traces_PG for trace in traces_G])
        return _grouped(flat, traces_PG)


class GaeAdvantage(Advantage):
    """delta_t = r_t + gamma V_{t+1} - V_t, A_t = sum (gamma lambda)^l delta_{t+l}, whitened (arXiv 1506.02438)."""

    type: Literal["gae"] = "gae"
    columns: ClassVar[frozenset[str]] = frozenset({"values"})
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from token to token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """1 is returns less values, 0 trusts the values alone."""
    whiten: bool = True
    """Over all tokens of the step."""

    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
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


class OnPolicyDistillAdvantage(Advantage):
    """coef (t - s): the one-sample estimate of -KL(policy || teacher) at each token."""

    type: Literal["on_policy_distill"] = "on_policy_distill"
    columns: ClassVar[frozenset[str]] = frozenset({"teacher"})
    reads_rewards: ClassVar[bool] = False
    coef: float = Field(default=1.0, gt=0)
    """Scale."""

    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """Rewards do not count."""
        return [
            [self.coef * (trace.columns["teacher"] - trace.logprobs) for trace in traces_G] for traces_G in traces_PG
        ]


class JsdAdvantage(Advantage):
    """-coef (b (t - m) + (1 - b) (s - m)), m = log((1 - b) e^s + b e^t); b = 0 is s - t, b = 1 is t - s."""

    type: Literal["jsd"] = "jsd"
    columns: ClassVar[frozenset[str]] = frozenset({"teacher"})
    reads_rewards: ClassVar[bool] = False
    coef: float = Field(default=1.0, gt=0)
    """Scale."""
    beta: float = Field(default=0.5, ge=0, le=1)
    """b, the teacher's share of the mixture."""

    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """Rewards do not count."""
        return [[-self.coef * self._divergence(trace) for trace in traces_G] for traces_G in traces_PG]

    def _divergence(self, trace: Trace) -> np.ndarray:
        student_T, teacher_T, b = trace.logprobs, trace.columns["teacher"], self.beta
        if b in (0.0, 1.0):
            return student_T - teacher_T if b == 0.0 else teacher_T - student_T
        mixture_T = np.logaddexp(student_T + np.log(1 - b), teacher_T + np.log(b))
        return b * (teacher_T - mixture_T) + (1 - b) * (student_T - mixture_T)
