"""Direct preference optimization: a loss over pairs of replies, without rewards (arXiv 2305.18290)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.rl.algorithms.arrays import Array, library_of, sums_of_rows
from tinsmith.rl.algorithms.losses.base import Losses, PolicyLoss, SamplerRatio, Tokens


class DpoLoss(PolicyLoss):
    """-(1 - s) log sigmoid(m) - s log sigmoid(-m), mean over pairs, with m = beta ((c - c_ref) - (r - r_ref)).

    c and r are the logprobs of the whole chosen and the whole rejected reply; s is the label smoothing. The aggregate
    is not used.
    """

    type: Literal["dpo"] = "dpo"
    linear: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = False
    reads_reference: ClassVar[bool] = True
    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull to the reference: the smaller, the further the policy may move away."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """s, the assumed probability that the labels of a pair are swapped."""

    @property
    @override
    def sampler_ratio(self) -> SamplerRatio:
        return "none"

    @override
    def total(self, logprobs: Array, batch: Tokens) -> Losses:
        """The loss and its metrics. Raises ConfigError if the batch has no pairs."""
        if batch.pairs is None or batch.reference is None:
            raise ConfigError(
                "dpo trains on pairs of a chosen and a rejected reply, but the data has none.",
                "Set chosen and rejected on demonstrations.data.",
            )
        rows = int(batch.sequence[-1]) + 1
        log_ratios = sums_of_rows(logprobs - batch.reference, batch.sequence, rows)
        chosen, rejected = log_ratios[batch.pairs[:, 0]], log_ratios[batch.pairs[:, 1]]
        margin = self.beta * (chosen - rejected)
        library, smoothing = library_of(margin), self.label_smoothing
        zeros = library.zeros_like(margin)
        losses = (1 - smoothing) * library.logaddexp(zeros, -margin) + smoothing * library.logaddexp(zeros, margin)
        metrics = {
            "dpo/accuracy": ((margin > 0) * 1.0).mean(),
            "dpo/margin": margin.mean(),
            "dpo/chosen": self.beta * chosen.mean(),
            "dpo/rejected": self.beta * rejected.mean(),
        }
        return losses.mean(), metrics
