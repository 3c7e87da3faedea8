"""Direct preference optimization: pairs of replies, no rewards (arXiv 2305.18290)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from tinsmith.errors import ConfigError
from tinsmith.rl.algorithms.losses.base import Losses, PolicyLoss, Tokens


class DpoLoss(PolicyLoss):
    """-(1 - s) log sigmoid(m) - s log sigmoid(-m), the mean over pairs; m = beta ((c - c_ref) - (r - r_ref)).

    c and r are the logprobs of the whole chosen and the whole rejected reply.
    """

    type: Literal["dpo"] = "dpo"
    linear: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = False
    reads_reference: ClassVar[bool] = True
    beta: float = Field(default=0.1, gt=0)
    """How far the policy may go from the reference: smaller is farther."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """s: the chance that a pair is the wrong way round."""

    def total(self, logprobs: Tensor, batch: Tokens) -> Losses:
        """The aggregate does not count."""
        if batch.pairs is None or batch.reference is None:
            raise ConfigError("dpo trains on pairs of a chosen and a rejected reply.", "Give data with both.")
        rows = int(batch.sequence[-1]) + 1
        log_ratios = torch.zeros(rows, dtype=logprobs.dtype).index_add(0, batch.sequence, logprobs - batch.reference)
        chosen, rejected = log_ratios[batch.pairs[:, 0]], log_ratios[batch.pairs[:, 1]]
        margin = self.beta * (chosen - rejected)
        losses = -(1 - self.label_smoothing) * logsigmoid(margin) - self.label_smoothing * logsigmoid(-margin)
        metrics = {
            "dpo/accuracy": (margin > 0).to(margin).mean(),
            "dpo/margin": margin.mean(),
            "dpo/chosen": self.beta * chosen.mean(),
            "dpo/rejected": self.beta * rejected.mean(),
        }
        return losses.mean(), metrics
