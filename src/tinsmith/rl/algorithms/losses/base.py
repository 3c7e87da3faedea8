"""Base class of policy losses: a loss for each token, and the weights of the aggregate that sum them up.

The T tokens of all rows of an update are concatenated; `sequence` is the row of each. The loss is the sum of w_t l_t
with the weights of the aggregate, so means cover the whole batch, however its rows are split into requests. Tensors
are float64 on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tinsmith.settings import Settings

Aggregate = Literal["token_sum", "token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]

LOG_RATIO_LIMIT = 20.0
"""Bound of a log ratio before it is exponentiated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """All tokens of an update; tensors are [T] and rows count from 0."""

    old: Tensor
    """Logprobs of the sampling policy; 0 at tokens of demonstrations."""
    advantages: Tensor
    sequence: Tensor
    """int64: the row of each token, in ascending order."""
    counts: Tensor
    """Number of identical replies merged into the token's row."""
    expert: Tensor
    """bool: whether the token is of a demonstration rather than the policy."""
    weights: Tensor
    """Weights w of the aggregate over all rows, for one reply of each row."""
    policy_weights: Tensor
    """Weights of the aggregate over the policy's rows alone; 0 at demonstrations."""
    expert_weights: Tensor
    """Weights of the aggregate over demonstrations alone; 0 at the policy's tokens."""
    reference: Tensor | None = None
    """Logprobs of the reference."""
    proximal: Tensor | None = None
    """Logprobs of the trained policy before the first update of the batch; None if it has one update."""
    pairs: Tensor | None = None
    """int64 [pairs, 2]: rows of the chosen and the rejected reply of each pair."""
    step: int = 1
    """Step of the run, from 1."""

    def row_mean(self, values: Tensor) -> Tensor:
        """[T]: the mean of `values` over the row of each token."""
        rows = int(self.sequence[-1]) + 1
        zeros = torch.zeros(rows, dtype=values.dtype)
        sums = zeros.index_add(0, self.sequence, values)
        return (sums / zeros.index_add(0, self.sequence, torch.ones_like(values)))[self.sequence]

    def select_rows(self, selected: Tensor) -> Tokens:
        """The tokens of the `selected` rows (bool [rows]), with unchanged weights and without pairs."""
        inside = selected[self.sequence]
        number = torch.cumsum(selected.long(), 0) - 1
        return Tokens(
            old=self.old[inside],
            advantages=self.advantages[inside],
            sequence=number[self.sequence][inside],
            counts=self.counts[inside],
            expert=self.expert[inside],
            weights=self.weights[inside],
            policy_weights=self.policy_weights[inside],
            expert_weights=self.expert_weights[inside],
            reference=None if self.reference is None else self.reference[inside],
            proximal=None if self.proximal is None else self.proximal[inside],
            step=self.step,
        )


def aggregate_weights(aggregate: Aggregate, sequence: Tensor, counts: Tensor, among: Tensor) -> Tensor:
    """Weights w, float64 [T], of the tokens in `among` (bool [T]); 0 elsewhere. A row of count c is c replies."""
    inside = among.double()
    rows = int(sequence[-1]) + 1 if len(sequence) else 0
    lengths = torch.zeros(rows, dtype=torch.float64).index_add(0, sequence, inside)
    replies = torch.zeros(rows, dtype=torch.float64).index_add(0, sequence, counts * inside) / lengths.clamp(min=1.0)
    number = replies.sum().clamp(min=1.0)
    match aggregate:
        case "token_sum":
            return inside
        case "token_mean":
            return inside / (lengths * replies).sum().clamp(min=1.0)
        case "seq_mean_token_sum":
            return inside / number
        case "seq_mean_token_mean":
            return inside / (number * lengths.clamp(min=1.0)[sequence])
        case "seq_mean_token_sum_norm":
            return inside / (number * lengths.max().clamp(min=1.0)) if rows else inside


SamplerRatio = Literal["none", "exact", "bounded"]
"""How a loss reads the sampler's logprobs: not at all, in an unbounded importance weight, or compared with the policy's
in any other way."""

Losses = tuple[Tensor, dict[str, Tensor]]
"""A loss to minimize, and its metrics."""


class PolicyLoss(Settings):
    """Base class of policy losses: their settings, and the loss of each token."""

    linear: ClassVar[bool] = True
    """Whether the loss is linear in the advantage, at least on each side of `advantage_kink`. Identical replies may
    then share a row with the sum of their advantages."""
    reads_reference: ClassVar[bool] = False
    """Whether the loss reads the reference's logprobs."""
    reads_advantage: ClassVar[bool] = True
    """Whether the loss reads the advantage."""

    @property
    def has_gradient_without_advantage(self) -> bool:
        """Whether rows with zero advantage have a gradient; otherwise they can be dropped."""
        return not self.reads_advantage

    @property
    def sampler_ratio(self) -> SamplerRatio:
        """How the loss reads the sampler's logprobs."""
        return "bounded"

    @property
    def advantage_kink(self) -> float | None:
        """The advantage at which a piecewise linear loss changes its form; None if it has none."""
        return None

    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses l [T] for logprobs [T], and metrics."""
        raise NotImplementedError

    def total(self, logprobs: Tensor, batch: Tokens) -> Losses:
        """The loss of the batch, the sum of w_t l_t, and metrics."""
        values, metrics = self.tokens(logprobs, batch)
        return (batch.weights * values).sum(), metrics


def log_ratio(logprobs: Tensor, batch: Tokens) -> Tensor:
    """Log of the importance ratio [T], clipped to +-20."""
    return (logprobs - batch.old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_fraction(condition: Tensor, batch: Tokens) -> Tensor:
    """Fraction of tokens at which `condition` (bool [T]) holds."""
    return (condition.to(batch.old) * batch.counts).sum() / batch.counts.sum().clamp(min=1.0)
