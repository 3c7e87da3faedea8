"""What is added to a policy loss: the divergence from a reference, and an entropy bonus.

With d = p - ref at sampled tokens: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman, Approximating KL Divergence).
As terms of a loss, on tokens of the policy itself, the gradient of k2 is that of KL(policy || reference); those of k1
and k3 are not, and k1's is zero on average. In the reward there is no gradient, and k1 and k3 are unbiased.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from torch import Tensor

from tinsmith.rl.algorithms.losses.base import LOG_RATIO_LIMIT, Tokens
from tinsmith.settings import Needs, Settings

Estimator = Literal["none", "k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3"]


class KlConfig(Settings):
    """A divergence and its weight."""

    type: Estimator = "k2"
    """low_var_kl is k3 with bounds of 20 and 10; abs is |d|; corrected_k3 is k3 times the ratio, at most 2."""
    coef: float = Field(default=0.0, ge=0)
    """Weight of the divergence; 0 requests no reference logprobs."""
    target: float | None = Field(default=None, gt=0)
    """Move the coefficient so that the mean divergence comes near this (arXiv 1909.08593)."""
    horizon: Annotated[float, Needs("target")] = Field(default=10_000.0, gt=0)
    """With `target`: replies over which the coefficient may move by a fifth."""

    @model_validator(mode="after")
    def _none_has_no_weight(self) -> KlConfig:
        if self.type == "none" and (self.coef or self.target):
            raise ValueError("type none has no coef and no target; leave them out, or choose k2")
        if self.target and not self.coef:
            raise ValueError("target moves the coefficient, which must begin above 0")
        return self

    @model_validator(mode="after")
    def _read_together(self) -> KlConfig:
        if self.type != "none" and "type" in self.model_fields_set and "coef" not in self.model_fields_set:
            raise ValueError(f"type {self.type} wants a coef beside it; without one there is no divergence")
        return self

    @property
    def enabled(self) -> bool:
        """Whether the reference's logprobs are needed."""
        return self.coef > 0

    def adapted_coef(self, coef: float, measured: float, replies: int) -> float:
        """The coefficient after an update in which `replies` replies had the mean divergence `measured`."""
        if self.target is None:
            return coef
        error = min(max(measured / self.target - 1.0, -0.2), 0.2)
        return coef * (1.0 + error * replies / self.horizon)


class EntropyConfig(Settings):
    """Entropy bonus: loss - coef H."""

    coef: float = 0.0
    """0 is none; negative sharpens."""


def divergence(kind: Estimator, logprobs: Tensor, old: Tensor, reference: Tensor) -> Tensor:
    """[T] at sampled tokens; `old` are the sampler's logprobs."""
    d = logprobs - reference
    match kind:
        case "none":
            return d * 0.0
        case "k1":
            return d
        case "k2":
            return 0.5 * d.square()
        case "k3":
            return (-d).exp() - 1.0 + d
        case "low_var_kl":
            bounded = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return ((-bounded).exp() - 1.0 + bounded).clamp(-10.0, 10.0)
        case "abs":
            return d.abs()
        case "corrected_k3":
            return (logprobs - old).exp().clamp(0.0, 2.0) * ((-d).exp() - 1.0 + d)


def sampled_entropy(logprobs: Tensor, batch: Tokens) -> tuple[Tensor, Tensor]:
    """(value [T], a term [T] whose gradient is the entropy's), each unbiased over sampled tokens.

    H = -E[p], and since E[grad p] = 0, grad H = -E[p grad p]; tokens of another policy count by their ratio.
    """
    ratio = (logprobs.detach() - batch.old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return -ratio * logprobs.detach(), -ratio * logprobs.detach() * logprobs
