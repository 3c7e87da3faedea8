"""Advantages with a value for each token: token returns, generalized advantage estimation, and distillation.

Values come from the critic (`rl/algorithms/critic.py`), logprobs of a teacher or of a reward model from the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from tinsmith.rl.algorithms.advantages.base import Advantage, Advantages, Trace, Traces, net_rewards, whiten

PROCESS, PROCESS_REFERENCE = "process", "process_reference"
"""Columns of prime: logprobs of the reward model, and of the reference of its training."""


class ReinforcePlusPlusAdvantage(Advantage):
    """R_t = r_t + gamma R_{t+1}, whitened over all tokens of the step (arXiv 2501.03262).

    r_t is the token reward: the rollout's reward at its last token, minus penalties.
    """

    type: Literal["reinforceplusplus"] = "reinforceplusplus"
    compares: ClassVar[bool] = False
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from token to token."""

    @property
    @override
    def of_groups(self) -> bool:
        return False

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        flat = whiten([discounted(trace.token_rewards, self.gamma) for traces_G in traces_PG for trace in traces_G])
        return _grouped(flat, traces_PG)


class GaeAdvantage(Advantage):
    """A_t = sum of (gamma lambda)^l delta_{t+l}, whitened, with delta_t = r_t + gamma V_{t+1} - V_t (arXiv 1506.02438).

    V is the critic's value, and 0 after the last token.
    """

    type: Literal["gae"] = "gae"
    compares: ClassVar[bool] = False
    columns: ClassVar[frozenset[str]] = frozenset({"values"})
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from token to token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """lambda: 1 is the return minus the value (least bias), 0 the one-step error delta_t (least variance)."""
    whiten: bool = True
    """Subtract the mean and divide by the standard deviation over all tokens of the step."""

    @property
    @override
    def of_groups(self) -> bool:
        return not self.whiten

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        traces = [trace for traces_G in traces_PG for trace in traces_G]
        flat = [self.raw(trace.token_rewards, trace.columns["values"]) for trace in traces]
        return _grouped(whiten(flat) if self.whiten else flat, traces_PG)

    def raw(self, rewards_T: np.ndarray, values_T: np.ndarray) -> np.ndarray:
        """Advantages before whitening, float64 [T]. Plus the values, they are the returns that the critic learns."""
        next_values_T = np.append(values_T[1:], 0.0)
        return discounted(rewards_T + self.gamma * next_values_T - values_T, self.gamma * self.lam)


def discounted(values_T: np.ndarray, factor: float) -> np.ndarray:
    """Discounted sums: sum over l of factor^l x_{t+l}, float64 [T]."""
    sums = np.empty(len(values_T))
    following = 0.0
    for at in range(len(values_T) - 1, -1, -1):
        following = float(values_T[at]) + factor * following
        sums[at] = following
    return sums


def _grouped(flat: list[np.ndarray], traces_PG: Traces) -> Advantages:
    remaining = iter(flat)
    return [[next(remaining) for _ in traces_G] for traces_G in traces_PG]


class OnPolicyDistillAdvantage(Advantage):
    """coef (t - s), a one-sample estimate of -KL(policy || teacher) at each token. Reads no rewards.

    t and s are the logprobs of the teacher and of the sampling policy.
    """

    type: Literal["on_policy_distill"] = "on_policy_distill"
    compares: ClassVar[bool] = False
    columns: ClassVar[frozenset[str]] = frozenset({"teacher"})
    compares_policy: ClassVar[bool] = True
    reads_rewards: ClassVar[bool] = False
    coef: float = Field(default=1.0, gt=0)
    """Scale of the advantages."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """Add the advantages of later tokens, discounted by this from token to token; 0: of the token alone."""
    low: float | None = None
    """Lower bound of the advantages; null: none."""
    high: float | None = None
    """Upper bound of the advantages; null: none."""

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        return [[self._advantages(trace) for trace in traces_G] for traces_G in traces_PG]

    def _advantages(self, trace: Trace) -> np.ndarray:
        advantages_T = discounted(self.coef * (trace.columns["teacher"] - trace.logprobs), self.discount)
        return advantages_T.clip(-np.inf if self.low is None else self.low, np.inf if self.high is None else self.high)


class PrimeAdvantage(Advantage):
    """A_t = sum over s >= t of gamma^(s-t) (r_s - b) + R - B, PRIME (arXiv 2502.01456).

    r_t = beta (log p - log p_ref) is the implicit reward of token t by a model p that was trained on preferences
    relative to p_ref, R the reward of the reply. The baselines are those of rloo: B is the mean of R over the other
    replies of the group, b the mean of their means of r; in a group of one, both are 0.
    """

    type: Literal["prime"] = "prime"
    columns: ClassVar[frozenset[str]] = frozenset({PROCESS, PROCESS_REFERENCE})
    model: str = Field(min_length=1)
    """tinker:// path of a checkpoint of the training on preferences (dpo, ipo, kto), on the policy's server. It has the
    policy's tokenizer."""
    reference: str = ""
    """Reference of that training: a base model or a tinker:// path. Empty: the run's base model."""
    beta: float = Field(default=0.05, gt=0)
    """Scale of the rewards of tokens."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of the rewards of later tokens, from token to token."""

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        return [self._group_advantages(traces_G) for traces_G in traces_PG]

    def _group_advantages(self, traces_G: Sequence[Trace]) -> list[np.ndarray]:
        rewards_G = [self.beta * (trace.columns[PROCESS] - trace.columns[PROCESS_REFERENCE]) for trace in traces_G]
        means_G = np.array([rewards_T.mean() if len(rewards_T) else 0.0 for rewards_T in rewards_G], np.float64)
        outcomes_G = net_rewards(traces_G)
        outcomes_G -= _means_of_others(outcomes_G)
        return [
            discounted(rewards_T - baseline, self.gamma) + outcome
            for rewards_T, baseline, outcome in zip(rewards_G, _means_of_others(means_G), outcomes_G, strict=True)
        ]


def _means_of_others(values_G: np.ndarray) -> np.ndarray:
    """Of each value the mean of the other ones, float64 [G]; 0 if there are none."""
    return (values_G.sum() - values_G) / max(1, len(values_G) - 1)


class NoAdvantage(Advantage):
    """0 for every token, for losses that read no advantage. Reads no rewards."""

    type: Literal["none"] = "none"
    compares: ClassVar[bool] = False
    reads_rewards: ClassVar[bool] = False

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        return [[trace.full(0.0) for trace in traces_G] for traces_G in traces_PG]


class JsdAdvantage(Advantage):
    """-coef (b (t - m) + (1 - b) (s - m)), m = log((1 - b) e^s + b e^t), of a Jensen-Shannon divergence.

    t and s are the logprobs of the teacher and of the sampling policy. For b = 0 the inner term is s - t, for b = 1
    it is t - s. Reads no rewards.
    """

    type: Literal["jsd"] = "jsd"
    compares: ClassVar[bool] = False
    columns: ClassVar[frozenset[str]] = frozenset({"teacher"})
    compares_policy: ClassVar[bool] = True
    reads_rewards: ClassVar[bool] = False
    coef: float = Field(default=1.0, gt=0)
    """Scale of the advantages."""
    beta: float = Field(default=0.5, ge=0, le=1)
    """b: the teacher's share of the mixture m."""
    temperature: float = Field(default=1.0, gt=0)
    """Divide t and s by this before they are compared."""

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        return [[-self.coef * self._divergence(trace) for trace in traces_G] for traces_G in traces_PG]

    def _divergence(self, trace: Trace) -> np.ndarray:
        student_T, teacher_T = trace.logprobs / self.temperature, trace.columns["teacher"] / self.temperature
        b = self.beta
        if b in (0.0, 1.0):
            return student_T - teacher_T if b == 0.0 else teacher_T - student_T
        mixture_T = np.logaddexp(student_T + np.log(1 - b), teacher_T + np.log(b))
        return b * (teacher_T - mixture_T) + (1 - b) * (student_T - mixture_T)
