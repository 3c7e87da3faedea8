"""Advantages that compare the policy with a teacher, token by token.

With s the policy's logprob of a sampled token (the sampler's) and t the teacher's: on-policy distillation goes down
the reverse KL, `jsd` down a skewed Jensen-Shannon divergence.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from tinsmith.rl.algorithms.advantages.base import Advantage, Advantages, Trace, Traces


class OnPolicyDistill(Advantage):
    """coef (t - s): the one-sample estimate of -KL(policy || teacher) at each token."""

    type: Literal["on_policy_distill"] = "on_policy_distill"
    needs: ClassVar[frozenset[str]] = frozenset({"teacher"})
    reads_rewards: ClassVar[bool] = False
    coef: float = Field(default=1.0, gt=0)
    """Scale."""

    def of(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """Rewards do not count."""
        return [
            [self.coef * (trace.columns["teacher"] - trace.logprobs) for trace in traces_G] for traces_G in traces_PG
        ]


class Jsd(Advantage):
    """-coef (b (t - m) + (1 - b) (s - m)), m = log((1 - b) e^s + b e^t); b = 0 is s - t, b = 1 is t - s."""

    type: Literal["jsd"] = "jsd"
    needs: ClassVar[frozenset[str]] = frozenset({"teacher"})
    reads_rewards: ClassVar[bool] = False
    coef: float = Field(default=1.0, gt=0)
    """Scale."""
    beta: float = Field(default=0.5, ge=0, le=1)
    """b, the teacher's share of the mixture."""

    def of(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """Rewards do not count."""
        return [[-self.coef * self._divergence(trace) for trace in traces_G] for traces_G in traces_PG]

    def _divergence(self, trace: Trace) -> np.ndarray:
        student_T, teacher_T, b = trace.logprobs, trace.columns["teacher"], self.beta
        if b in (0.0, 1.0):
            return student_T - teacher_T if b == 0.0 else teacher_T - student_T
        mixture_T = np.logaddexp(student_T + np.log(1 - b), teacher_T + np.log(b))
        return b * (teacher_T - mixture_T) + (1 - b) * (student_T - mixture_T)
