"""Terms of the loss next to the policy loss: divergence from a reference, and an entropy bonus.

With d = p - ref at sampled tokens: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman, Approximating KL Divergence).
As a term of the loss on tokens sampled by the policy, k2 has the gradient of KL(policy || reference) in expectation;
k1 and k3 do not, and the gradient of k1 is zero in expectation. Subtracted from the reward, where only the value
matters, k1 and k3 are unbiased.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tinsmith.rl.algorithms.arrays import Array, library_of, without_gradient
from tinsmith.rl.algorithms.losses.base import LOG_RATIO_LIMIT, Tokens, importance_ratio
from tinsmith.settings import Needs, Settings

Estimator = Literal["none", "k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3"]


class KlConfig(Settings):
    """A divergence from the reference and its coefficient."""

    type: Estimator = "k2"
    """Estimator, with d = logprob - reference logprob: `k1` is d, `k2` is d^2 / 2, `k3` is exp(-d) - 1 + d,
    `low_var_kl` is k3 with d clipped to +-20 and the result to +-10, `abs` is |d|, and `corrected_k3` is k3 times the
    importance ratio, at most 2. In the loss use `k2`: its gradient is that of KL(policy || reference)."""
    coef: float = Field(default=0.0, ge=0)
    """Coefficient of the divergence; 0 turns it off, and no reference logprobs are computed."""
    target: float | None = Field(default=None, gt=0)
    """Adapt the coefficient so that the mean divergence approaches this value (arXiv 1909.08593)."""
    horizon: Annotated[float, Needs("target")] = Field(default=10_000.0, gt=0)
    """Replies over which the coefficient changes by at most 20 %, with `target`."""

    @model_validator(mode="after")
    def _check_none(self) -> KlConfig:
        if self.type == "none" and (self.coef or self.target):
            raise ValueError("coef and target are not used with type: none; leave them out, or set type to k2")
        if self.target and not self.coef:
            raise ValueError("target adapts coef, which is 0; set coef above 0")
        return self

    @model_validator(mode="after")
    def _check_coef(self) -> KlConfig:
        if self.type != "none" and "type" in self.model_fields_set and "coef" not in self.model_fields_set:
            raise ValueError(f"type {self.type} needs a coef; set coef, or leave out type")
        return self

    @property
    def enabled(self) -> bool:
        """Whether the reference's logprobs are needed."""
        return self.coef > 0

    def adapted_coef(self, coef: float, measured: float, replies: int) -> float:
        """The coefficient after an update of `replies` replies with the mean divergence `measured`."""
        if self.target is None:
            return coef
        error = min(max(measured / self.target - 1.0, -0.2), 0.2)
        return coef * (1.0 + error * replies / self.horizon)


class EntropyConfig(Settings):
    """Entropy bonus: coef H is subtracted from the loss."""

    coef: float = 0.0
    """Coefficient of the entropy; 0 turns it off, and a negative one lowers the entropy."""


def divergence(kind: Estimator, logprobs: Array, old: Array, reference: Array) -> Array:
    """Estimated divergence at sampled tokens, [T]. `old`: logprobs of the sampling policy."""
    library, d = library_of(logprobs), logprobs - reference
    match kind:
        case "none":
            return d * 0.0
        case "k1":
            return d
        case "k2":
            return 0.5 * d**2
        case "k3":
            return library.exp(-d) - 1.0 + d
        case "low_var_kl":
            bounded = library.clip(d, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return library.clip(library.exp(-bounded) - 1.0 + bounded, -10.0, 10.0)
        case "abs":
            return library.abs(d)
        case "corrected_k3":
            return library.clip(library.exp(logprobs - old), 0.0, 2.0) * (library.exp(-d) - 1.0 + d)


def sampled_entropy(logprobs: Array, batch: Tokens) -> tuple[Array, Array]:
    """Unbiased estimates of the entropy at sampled tokens: (value [T], surrogate [T] whose gradient is the entropy's).

    H = -E[p], and since E[grad p] = 0, grad H = -E[p grad p]. Tokens are weighted by their importance ratio.
    """
    constant = without_gradient(logprobs)
    ratio = importance_ratio(constant, batch)
    return -ratio * constant, -ratio * constant * logprobs
