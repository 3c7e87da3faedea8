"""Policy-gradient losses with bounded importance ratios.

Notation: p and q are the logprobs of the trained and of the sampling policy, r = exp(p - q) the importance ratio, A the
advantage, and sg(x) is x without gradient.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from tinsmith.rl.algorithms.arrays import Array, library_of, without_gradient
from tinsmith.rl.algorithms.losses.base import (
    PolicyLoss,
    SamplerRatio,
    Tokens,
    importance_ratio,
    log_ratio,
    token_fraction,
)
from tinsmith.settings import Needs


class ImportanceSamplingLoss(PolicyLoss):
    """-r A, the policy gradient with importance sampling and no clipping."""

    type: Literal["importance_sampling"] = "importance_sampling"

    @property
    @override
    def sampler_ratio(self) -> SamplerRatio:
        return "exact"

    @override
    def tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        return -batch.advantages * importance_ratio(logprobs, batch), {}


class PpoLoss(PolicyLoss):
    """max(-A r, -A clip(r, 1 - low, 1 + high)); where A < 0, at most -A c (arXiv 1707.06347, 1912.09729)."""

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, ge=0)
    """Lower clip bound of the ratio is 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """Upper clip bound of the ratio is 1 + clip_high."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """c, the bound of the loss at tokens with A < 0 (dual clip); null: no bound."""
    on_policy: bool = False
    """Use r = exp(p - sg(p)), the plain policy gradient, without importance sampling."""
    mask_drift: float | None = Field(default=None, gt=0)
    """Ignore tokens with A < 0 in replies whose mean q - p is above this; null: ignore none."""

    @property
    @override
    def sampler_ratio(self) -> SamplerRatio:
        return "none" if self.on_policy and self.mask_drift is None else "bounded"

    @property
    @override
    def advantage_kink(self) -> float | None:
        return 0.0

    @override
    def tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        library, constant = library_of(logprobs), without_gradient(logprobs)
        difference = logprobs - constant if self.on_policy else log_ratio(logprobs, batch)
        values, metrics = self.bounded(library.exp(difference), batch)
        if self.mask_drift is not None:
            drifted = batch.row_mean(batch.old - constant) > self.mask_drift
            values = library.where(drifted & (batch.advantages < 0), library.zeros_like(values), values)
        return values, metrics

    def bounded(self, ratio: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        """The clipped losses for importance ratios [T], and metrics."""
        library, advantages = library_of(ratio), batch.advantages
        plain = -advantages * ratio
        clipped = -advantages * library.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
        values = library.maximum(plain, clipped)
        metrics = {"clip_fraction": token_fraction(clipped > plain, batch)}
        if self.dual_clip is not None:
            ceiling = -advantages * self.dual_clip
            below = (advantages < 0) & (ceiling < values)
            values = library.where(below, ceiling, values)
            metrics["dual_clip_fraction"] = token_fraction(below, batch)
        return values, metrics


class GspoLoss(PolicyLoss):
    """PPO with one ratio per reply, exp(sg(mean(p - q)) + p - sg(p)) (arXiv 2507.18071).

    Use the aggregate seq_mean_token_mean.
    """

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0)
    """Lower clip bound of the ratio is 1 - clip_low."""
    clip_high: float = Field(default=4e-4, ge=0)
    """Upper clip bound of the ratio is 1 + clip_high."""

    @property
    @override
    def advantage_kink(self) -> float | None:
        return 0.0

    @override
    def tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        constant = without_gradient(logprobs)
        ratio = library_of(logprobs).exp(batch.row_mean(constant - batch.old) + logprobs - constant)
        return PpoLoss(clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=None).bounded(ratio, batch)


class CispoLoss(PolicyLoss):
    """-A sg(clip(r, 1 - low, 1 + high)) p (arXiv 2506.13585)."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, ge=0)
    """Lower clip bound of the ratio is 1 - clip_low; 1 is no bound."""
    clip_high: float = Field(default=0.28, ge=0)
    """Upper clip bound of the ratio is 1 + clip_high."""
    mask: bool = False
    """Ignore tokens that PPO clips: those with A > 0 above the upper bound and with A < 0 below the lower bound."""
    mask_low: Annotated[float | None, Needs("mask")] = Field(default=None, ge=0)
    """Lower bound of the mask is 1 - mask_low; not set: clip_low."""
    mask_high: Annotated[float | None, Needs("mask")] = Field(default=None, ge=0)
    """Upper bound of the mask is 1 + mask_high; not set: clip_high."""

    @property
    @override
    def advantage_kink(self) -> float | None:
        return 0.0 if self.mask else None

    @override
    def tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        library, ratio = library_of(logprobs), importance_ratio(without_gradient(logprobs), batch)
        weight = library.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
        if self.mask:
            low = self.clip_low if self.mask_low is None else self.mask_low
            high = self.clip_high if self.mask_high is None else self.mask_high
            beyond = library.where(batch.advantages > 0, ratio > 1 + high, ratio < 1 - low)
            weight = library.where(beyond & (batch.advantages != 0), library.zeros_like(weight), weight)
        return -batch.advantages * weight * logprobs, {"clip_fraction": token_fraction(weight != ratio, batch)}


class SapoLoss(PolicyLoss):
    """-A (4 / tau) sigmoid(tau (r - 1)), a soft gate in place of clipping (arXiv 2511.20347)."""

    type: Literal["sapo"] = "sapo"
    tau_positive: float = Field(default=1.0, gt=0)
    """tau at tokens with A > 0."""
    tau_negative: float = Field(default=1.05, gt=0)
    """tau at all other tokens."""
    score_function: bool = False
    """Use -A sg(gate) p, which does not differentiate the gate, in place of the paper's objective."""

    @property
    @override
    def advantage_kink(self) -> float | None:
        return 0.0

    @override
    def tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        library = library_of(logprobs)
        ratio = importance_ratio(without_gradient(logprobs) if self.score_function else logprobs, batch)
        positive, negative = (library.full_like(ratio, each) for each in (self.tau_positive, self.tau_negative))
        tau = library.where(batch.advantages > 0, positive, negative)
        gate = 4.0 / tau / (1.0 + library.exp(tau * (1.0 - ratio)))
        return -batch.advantages * gate * (logprobs if self.score_function else 1.0), {}


class ToprLoss(PolicyLoss):
    """-sg(a) A p, where a is 1 for A above the threshold, else r clipped to [0, 1] (arXiv 2503.14286)."""

    type: Literal["topr"] = "topr"
    threshold: float = 0.0
    """Tokens with an advantage above this are not weighted by the ratio."""

    @property
    @override
    def advantage_kink(self) -> float | None:
        return self.threshold

    @override
    def tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        library = library_of(logprobs)
        ratio = library.clip(importance_ratio(without_gradient(logprobs), batch), 0.0, 1.0)
        taper = library.where(batch.advantages > self.threshold, library.ones_like(ratio), ratio)
        return -taper * batch.advantages * logprobs, {}


class SppoLoss(PolicyLoss):
    """-A (p - q) where 1 / (1 + epsilon) <= r <= 1 + epsilon, else 0."""

    type: Literal["sppo"] = "sppo"
    epsilon: float = Field(default=0.3, gt=0)
    """Half-width of the interval in which the ratio must be: 1 / (1 + epsilon) to 1 + epsilon."""

    @override
    def tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        library, ratio = library_of(logprobs), importance_ratio(without_gradient(logprobs), batch)
        inside = (ratio >= 1 / (1 + self.epsilon)) & (ratio <= 1 + self.epsilon)
        values = -batch.advantages * (logprobs - batch.old)
        bounded = library.where(inside, values, library.zeros_like(values))
        return bounded, {"clip_fraction": token_fraction(~inside, batch)}


class DroLoss(PolicyLoss):
    """-(p A - beta / 2 (p - q)^2), without a ratio (arXiv 2405.19107)."""

    type: Literal["dro"] = "dro"
    linear: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = False
    beta: float = Field(default=0.05, ge=0)
    """Weight of the quadratic term, which keeps the policy near the sampling policy."""

    @override
    def tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        return -logprobs * batch.advantages + 0.5 * self.beta * (logprobs - batch.old) ** 2, {}


class RecLoss(PolicyLoss):
    """-w A p where the ratio is inside the clip region, else 0: a family from REINFORCE to PPO (arXiv 2509.24203)."""

    type: Literal["rec"] = "rec"
    linear: ClassVar[bool] = False
    clip: Literal["none", "one_side", "two_side", "ring", "gspo_one_side"] = "one_side"
    """Clip region, outside which tokens are ignored. `none`: all ratios; `one_side`: those that PPO does not clip;
    `two_side`: between both bounds; `ring`: between both bounds, and far outside where the update moves the ratio back
    to 1; `gspo_one_side`: one_side with the ratio of the reply, exp(mean(p - q))."""
    clip_low: Annotated[float, Needs("clip")] = Field(default=0.2, ge=0)
    """Lower clip bound of the ratio is 1 - clip_low."""
    clip_high: Annotated[float, Needs("clip")] = Field(default=0.2, ge=0)
    """Upper clip bound of the ratio is 1 + clip_high."""
    ring_low: Annotated[float, Needs("clip", ("ring",))] = Field(default=0.6, ge=0)
    """With `ring`: tokens with A > 0 also count where the ratio is at most 1 - ring_low."""
    ring_high: Annotated[float, Needs("clip", ("ring",))] = Field(default=2.0, ge=0)
    """With `ring`: tokens with A < 0 also count where the ratio is at least 1 + ring_high."""
    weight: Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"] = "none"
    """Weight w: 1 (`none`), sg(r), the ratio of the reply, or exp(A / temperature) (`advantage`)."""
    temperature: Annotated[float, Needs("weight", ("advantage",))] = Field(default=1.0, gt=0)
    """Temperature of the weight `advantage`."""
    regularizer: Literal["none", "k2", "forward_kl"] = "none"
    """Term added to the loss: (p - q)^2 / 2 (`k2`) or q - p (`forward_kl`)."""
    regularizer_coef: Annotated[float, Needs("regularizer")] = Field(default=0.0, ge=0)
    """Weight of the regularizer."""

    @property
    @override
    def has_gradient_without_advantage(self) -> bool:
        return self.regularizer != "none" and self.regularizer_coef > 0

    @override
    def tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        library, constant = library_of(logprobs), without_gradient(logprobs)
        ratio, reply = importance_ratio(constant, batch), library.exp(batch.row_mean(constant - batch.old))
        inside = self._inside(reply if self.clip == "gspo_one_side" else ratio, batch.advantages)
        weight = {
            "none": library.ones_like(ratio),
            "importance_sampling": ratio,
            "gspo_importance_sampling": reply,
            "advantage": library.exp(batch.advantages / self.temperature),
        }[self.weight]
        values = -batch.advantages * weight * inside * logprobs
        if self.regularizer == "k2":
            values = values + self.regularizer_coef * 0.5 * (logprobs - batch.old) ** 2
        elif self.regularizer == "forward_kl":
            values = values + self.regularizer_coef * (batch.old - logprobs)
        return values, {"clip_fraction": token_fraction(~inside, batch)}

    def _inside(self, ratio: Array, advantages: Array) -> Array:
        library, low, high = library_of(ratio), ratio >= 1 - self.clip_low, ratio <= 1 + self.clip_high
        match self.clip:
            case "none":
                return library.ones_like(low)
            case "one_side" | "gspo_one_side":
                return library.where(advantages >= 0, high, low)
            case "two_side":
                return low & high
            case "ring":
                far_below, far_above = ratio <= 1 - self.ring_low, ratio >= 1 + self.ring_high
                return (low & high) | ((advantages > 0) & far_below) | ((advantages < 0) & far_above)
