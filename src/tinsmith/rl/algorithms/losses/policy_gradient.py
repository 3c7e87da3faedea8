"""Policy-gradient losses with bounded importance ratios.

Notation: p and q are the logprobs of the trained and of the sampling policy, r = exp(p - q) the importance ratio, A the
advantage, and sg(x) is x without gradient.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from tinsmith.rl.algorithms.losses.base import PolicyLoss, SamplerRatio, Tokens, log_ratio, token_fraction
from tinsmith.settings import Needs


class ImportanceSamplingLoss(PolicyLoss):
    """-r A, the policy gradient with importance sampling and no clipping."""

    type: Literal["importance_sampling"] = "importance_sampling"

    @property
    @override
    def sampler_ratio(self) -> SamplerRatio:
        return "exact"

    @override
    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        return -batch.advantages * log_ratio(logprobs, batch).exp(), {}


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
    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        difference = logprobs - logprobs.detach() if self.on_policy else log_ratio(logprobs, batch)
        values, metrics = self.bounded(difference.exp(), batch)
        if self.mask_drift is not None:
            drifted = batch.row_mean(batch.old - logprobs.detach()) > self.mask_drift
            values = torch.where(drifted & (batch.advantages < 0), torch.zeros_like(values), values)
        return values, metrics

    def bounded(self, ratio: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The clipped losses for importance ratios [T], and metrics."""
        advantages = batch.advantages
        plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        values = torch.maximum(plain, clipped)
        metrics = {"clip_fraction": token_fraction(clipped > plain, batch)}
        if self.dual_clip is not None:
            ceiling = -advantages * self.dual_clip
            below = (advantages < 0) & (ceiling < values)
            values = torch.where(below, ceiling, values)
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
    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (batch.row_mean((logprobs - batch.old).detach()) + logprobs - logprobs.detach()).exp()
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
    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = log_ratio(logprobs.detach(), batch).exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        if self.mask:
            low = self.clip_low if self.mask_low is None else self.mask_low
            high = self.clip_high if self.mask_high is None else self.mask_high
            beyond = torch.where(batch.advantages > 0, ratio > 1 + high, ratio < 1 - low)
            weight = torch.where(beyond & (batch.advantages != 0), torch.zeros_like(weight), weight)
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
    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        source = logprobs.detach() if self.score_function else logprobs
        ratio = log_ratio(source, batch).exp()
        positive, negative = ratio.new_tensor(self.tau_positive), ratio.new_tensor(self.tau_negative)
        tau = torch.where(batch.advantages > 0, positive, negative)
        gate = 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0))
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
    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = log_ratio(logprobs.detach(), batch).exp().clamp(0.0, 1.0)
        taper = torch.where(batch.advantages > self.threshold, torch.ones_like(ratio), ratio)
        return -taper * batch.advantages * logprobs, {}


class SppoLoss(PolicyLoss):
    """-A (p - q) where 1 / (1 + epsilon) <= r <= 1 + epsilon, else 0."""

    type: Literal["sppo"] = "sppo"
    epsilon: float = Field(default=0.3, gt=0)
    """Half-width of the interval in which the ratio must be: 1 / (1 + epsilon) to 1 + epsilon."""

    @override
    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = log_ratio(logprobs.detach(), batch).exp()
        inside = (ratio >= 1 / (1 + self.epsilon)) & (ratio <= 1 + self.epsilon)
        values = -batch.advantages * (logprobs - batch.old)
        return torch.where(inside, values, torch.zeros_like(values)), {"clip_fraction": token_fraction(~inside, batch)}


class DroLoss(PolicyLoss):
    """-(p A - beta / 2 (p - q)^2), without a ratio (arXiv 2405.19107)."""

    type: Literal["dro"] = "dro"
    linear: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = False
    beta: float = Field(default=0.05, ge=0)
    """Weight of the quadratic term, which keeps the policy near the sampling policy."""

    @override
    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs * batch.advantages + 0.5 * self.beta * (logprobs - batch.old).square(), {}


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
    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = log_ratio(logprobs.detach(), batch).exp()
        reply = batch.row_mean(logprobs.detach() - batch.old).exp()
        inside = self._inside(reply if self.clip == "gspo_one_side" else ratio, batch.advantages)
        weight = {
            "none": torch.ones_like(ratio),
            "importance_sampling": ratio,
            "gspo_importance_sampling": reply,
            "advantage": (batch.advantages / self.temperature).exp(),
        }[self.weight]
        values = -batch.advantages * weight * inside.to(ratio) * logprobs
        if self.regularizer == "k2":
            values = values + self.regularizer_coef * 0.5 * (logprobs - batch.old).square()
        elif self.regularizer == "forward_kl":
            values = values + self.regularizer_coef * (batch.old - logprobs)
        return values, {"clip_fraction": token_fraction(~inside, batch)}

    def _inside(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        low, high = ratio >= 1 - self.clip_low, ratio <= 1 + self.clip_high
        match self.clip:
            case "none":
                return torch.ones_like(low)
            case "one_side" | "gspo_one_side":
                return torch.where(advantages >= 0, high, low)
            case "two_side":
                return low & high
            case "ring":
                far_below, far_above = ratio <= 1 - self.ring_low, ratio >= 1 + self.ring_high
                return (low & high) | ((advantages > 0) & far_below) | ((advantages < 0) & far_above)
