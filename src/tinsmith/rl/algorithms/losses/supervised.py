"""Losses that raise or lower likelihoods: no ratio to the sampler."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from tinsmith.rl.algorithms.losses.base import Losses, PolicyLoss, Tokens
from tinsmith.rl.algorithms.losses.policy_gradient import PpoLoss


class OpmdLoss(PolicyLoss):
    """-A p / (1 + tau)."""

    type: Literal["opmd"] = "opmd"
    tau: float = Field(default=0.0, ge=0)
    """Temperature of the mirror descent."""

    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """[T]."""
        return -batch.advantages * logprobs / (1.0 + self.tau), {}


class SftLoss(PolicyLoss):
    """-p: advantages do not count."""

    type: Literal["sft"] = "sft"
    linear: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = False

    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """[T]."""
        return -logprobs, {}


class SftIsLoss(PolicyLoss):
    """-sg(exp(p)) p: likely tokens count most."""

    type: Literal["sft_is"] = "sft_is"
    linear: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = False

    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """[T]."""
        return -logprobs.detach().exp() * logprobs, {}


class SftPhiLoss(PolicyLoss):
    """-sg(P (1 - P)) p, P = exp(p): tokens that are neither certain nor hopeless count (CHORD, arXiv 2508.11408)."""

    type: Literal["sft_phi"] = "sft_phi"
    linear: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = False

    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """[T]."""
        chance = logprobs.detach().exp()
        return -chance * (1.0 - chance) * logprobs, {}


class _MixtureLoss(PolicyLoss):
    """(1 - mu) PPO over the policy's tokens + mu times a likelihood over the expert's, each with weights of its own."""

    linear: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = False
    clip_low: float = Field(default=0.2, ge=0)
    """Of PPO: the ratio may fall this far below 1."""
    clip_high: float = Field(default=0.2, ge=0)
    """Of PPO: the ratio may rise this far above 1."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """Of PPO; null is none."""

    def _mixed(self, logprobs: Tensor, batch: Tokens, mu: float, expert: PolicyLoss) -> Losses:
        ppo = PpoLoss(clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip)
        usual, metrics = ppo.tokens(logprobs, batch)
        taught, _ = expert.tokens(logprobs, batch)
        own = (batch.policy_weights * usual).sum()
        theirs = (batch.expert_weights * taught).sum()
        return (1 - mu) * own + mu * theirs, {**metrics, "mix/policy": own, "mix/expert": theirs}


class MixLoss(_MixtureLoss):
    """A level share of the expert."""

    type: Literal["mix"] = "mix"
    mu: float = Field(default=0.1, ge=0, le=1)
    """The expert's share."""

    def total(self, logprobs: Tensor, batch: Tokens) -> Losses:
        """Both parts over the whole batch."""
        return self._mixed(logprobs, batch, self.mu, SftLoss())


class MixChordLoss(_MixtureLoss):
    """mu rises to a peak and falls to a valley over the steps (CHORD, arXiv 2508.11408)."""

    type: Literal["mix_chord"] = "mix_chord"
    warmup_steps: int = Field(default=200, ge=0)
    """Steps from 0 to the peak, in a line."""
    decay_steps: int = Field(default=400, ge=0)
    """Steps from the peak to the valley, along a cosine."""
    peak: float = Field(default=0.1, ge=0, le=1)
    """Largest mu."""
    valley: float = Field(default=0.1, ge=0, le=1)
    """mu from then on."""
    phi: bool = True
    """Weigh the expert's tokens by P (1 - P)."""

    def share_at(self, step: int) -> float:
        """mu at a step, from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.decay_steps)
        if done >= 1:
            return self.valley
        return self.valley + (self.peak - self.valley) * 0.5 * (1 + math.cos(math.pi * done))

    def total(self, logprobs: Tensor, batch: Tokens) -> Losses:
        """Of the batch's step."""
        mu = self.share_at(batch.step)
        loss, metrics = self._mixed(logprobs, batch, mu, SftPhiLoss() if self.phi else SftLoss())
        return loss, {**metrics, "mix/mu": loss.new_tensor(mu)}
