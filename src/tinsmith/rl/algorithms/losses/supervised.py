"""Likelihood losses, without an importance ratio.

Notation: p is the logprob of a token under the trained policy, P = exp(p), and sg(x) is x without gradient.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from tinsmith.rl.algorithms.arrays import Array, library_of, without_gradient
from tinsmith.rl.algorithms.losses.base import Aggregate, Losses, PolicyLoss, SamplerRatio, Tokens
from tinsmith.rl.algorithms.losses.policy_gradient import PpoLoss


class OpmdLoss(PolicyLoss):
    """-A p / (1 + tau), the log-likelihood weighted by the advantage."""

    type: Literal["opmd"] = "opmd"
    tau: float = Field(default=0.0, ge=0)
    """Temperature of the mirror descent; scales the loss by 1 / (1 + tau)."""

    @property
    @override
    def sampler_ratio(self) -> SamplerRatio:
        return "none"

    @override
    def tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        return -batch.advantages * logprobs / (1.0 + self.tau), {}


class LikelihoodLoss(PolicyLoss):
    """A loss of the tokens' likelihood alone: advantages are not used."""

    linear: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = False

    @property
    @override
    def sampler_ratio(self) -> SamplerRatio:
        return "none"


class SftLoss(LikelihoodLoss):
    """-p, the negative log-likelihood; advantages are not used."""

    type: Literal["sft"] = "sft"

    @override
    def tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        return -logprobs, {}


class SftIsLoss(LikelihoodLoss):
    """-sg(P) p, the negative log-likelihood weighted by the probability of the token."""

    type: Literal["sft_is"] = "sft_is"

    @override
    def tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        return -library_of(logprobs).exp(without_gradient(logprobs)) * logprobs, {}


class SftPhiLoss(LikelihoodLoss):
    """-sg(P (1 - P)) p, with little weight on almost certain and very unlikely tokens (CHORD, arXiv 2508.11408)."""

    type: Literal["sft_phi"] = "sft_phi"

    @override
    def tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        probs = library_of(logprobs).exp(without_gradient(logprobs))
        return -probs * (1.0 - probs) * logprobs, {}


class MixtureLoss(PolicyLoss):
    """(1 - mu) x PPO over tokens of the policy + mu x a likelihood loss over demonstrations, aggregated separately."""

    linear: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = False
    clip_low: float = Field(default=0.2, ge=0)
    """Lower clip bound of PPO's ratio is 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """Upper clip bound of PPO's ratio is 1 + clip_high."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """c of PPO, the bound of the loss at tokens with A < 0 (dual clip); null: no bound."""
    expert_aggregate: Aggregate | None = None
    """How token losses of demonstrations add up; not set: like those of rollouts, algorithm.aggregate."""

    def _mixed(self, logprobs: Array, batch: Tokens, mu: float, expert: PolicyLoss) -> Losses:
        ppo = PpoLoss(clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip)
        policy_losses, metrics = ppo.tokens(logprobs, batch)
        expert_losses, _ = expert.tokens(logprobs, batch)
        policy_loss = (batch.policy_weights * policy_losses).sum()
        expert_loss = (batch.expert_weights * expert_losses).sum()
        loss = (1 - mu) * policy_loss + mu * expert_loss
        return loss, {**metrics, "mix/policy": policy_loss, "mix/expert": expert_loss}


class MixLoss(MixtureLoss):
    """(1 - mu) x ppo over rollouts + mu x sft over demonstrations, with a constant mu."""

    type: Literal["mix"] = "mix"
    mu: float = Field(default=0.1, ge=0, le=1)
    """Share of the demonstrations in the loss."""

    @override
    def total(self, logprobs: Array, batch: Tokens) -> Losses:
        return self._mixed(logprobs, batch, self.mu, SftLoss())


class MixChordLoss(MixtureLoss):
    """mix with a schedule of mu: a linear rise from 0 to a peak, then a cosine decay (CHORD, arXiv 2508.11408)."""

    type: Literal["mix_chord"] = "mix_chord"
    warmup_steps: int = Field(default=200, ge=0)
    """Steps of the linear rise of mu from 0 to the peak."""
    decay_steps: int = Field(default=400, ge=0)
    """Steps of the cosine decay of mu from the peak to the valley."""
    peak: float = Field(default=0.1, ge=0, le=1)
    """Largest value of mu, reached after `warmup_steps`."""
    valley: float = Field(default=0.1, ge=0, le=1)
    """Value of mu after the decay."""
    phi: bool = True
    """Weight tokens of demonstrations by P (1 - P), P being their probability (the loss sft_phi)."""

    def share_at(self, step: int) -> float:
        """The value of mu at `step`, counted from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.decay_steps)
        if progress >= 1:
            return self.valley
        return self.valley + (self.peak - self.valley) * 0.5 * (1 + math.cos(math.pi * progress))

    @override
    def total(self, logprobs: Array, batch: Tokens) -> Losses:
        mu = self.share_at(batch.step)
        loss, metrics = self._mixed(logprobs, batch, mu, SftPhiLoss() if self.phi else SftLoss())
        return loss, {**metrics, "mix/mu": library_of(loss).full_like(loss, mu)}
