"""Correction of the mismatch between sampler and trainer, whose logprobs of the same weights differ.

With p the trainer's logprob of a token before the update and q the sampler's, the weight of a token is a bounded
exp(p - q), without gradient. The policy loss is multiplied by it, and its importance ratios are relative to p. Each
batch is trained on in one update, so these ratios are 1 in value, and losses that only bound the ratio all have the
gradient -weight A grad p.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tinsmith.rl.algorithms.losses.base import LOG_RATIO_LIMIT, Tokens, token_fraction
from tinsmith.settings import Needs, Settings

_ON = ("tis", "mis")


class CorrectionConfig(Settings):
    """Importance weights that correct the difference between sampler and trainer."""

    type: Literal["none", "tis", "mis"] = "none"
    """`tis` truncates weights at `cap` (truncated importance sampling); `mis` ignores tokens whose weight is not
    between `floor` and `cap` (masked importance sampling, IcePop); `none` uses the ratio of the loss alone."""
    level: Annotated[Literal["token", "sequence"], Needs("type", _ON)] = "token"
    """One weight for each token, or the product of all tokens of a row (`sequence`)."""
    cap: Annotated[float, Needs("type", _ON)] = Field(default=2.0, gt=0)
    """Largest weight."""
    floor: Annotated[float, Needs("type", ("mis",))] = Field(default=0.0, ge=0)
    """Smallest weight that is not ignored."""

    @model_validator(mode="after")
    def _check_bounds(self) -> CorrectionConfig:
        if self.floor > self.cap:
            raise ValueError(f"floor {self.floor:g} is above cap {self.cap:g}")
        return self

    @property
    def enabled(self) -> bool:
        """Whether losses are weighted."""
        return self.type != "none"

    def corrected(self, logprobs: Tensor, batch: Tokens) -> tuple[Tokens, dict[str, Tensor]]:
        """The batch with weighted tokens whose importance ratios are relative to the trainer, and metrics."""
        ratio = self._ratio(logprobs.detach() - batch.old, batch)
        weight = torch.where(batch.expert, torch.ones_like(ratio), self._bounded(ratio))
        policy = batch.counts * ~batch.expert
        metrics = {
            "correction/weight": (weight * policy).sum() / policy.sum().clamp(min=1.0),
            "correction/bounded": token_fraction((weight != ratio) & ~batch.expert, batch),
        }
        old = torch.where(batch.expert, batch.old, logprobs.detach())
        scaled = {"weights": batch.weights * weight, "policy_weights": batch.policy_weights * weight}
        return replace(batch, old=old, **scaled), metrics

    def _ratio(self, difference: Tensor, batch: Tokens) -> Tensor:
        if self.level == "sequence":
            rows = torch.zeros(int(batch.sequence[-1]) + 1, dtype=difference.dtype)
            difference = rows.index_add(0, batch.sequence, difference)[batch.sequence]
        return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

    def _bounded(self, ratio: Tensor) -> Tensor:
        if self.type == "tis":
            return ratio.clamp(max=self.cap)
        return torch.where((ratio >= self.floor) & (ratio <= self.cap), ratio, torch.zeros_like(ratio))
