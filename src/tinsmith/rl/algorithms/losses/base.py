"""What a policy loss is: a number for each token of the policy, and the weights that make one loss of them.

T tokens of all rows of an update stand in one tensor, row after row; `sequence` says which row each belongs to. A loss
is sum w_t l_t with the weights of an aggregate, so a mean over the batch's tokens is one over all of them, however the
rows are cut for the server. Tensors are float64 on the CPU.
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
    """An update's tokens, [T] each; rows counted from 0."""

    old: Tensor
    """The sampler's logprobs; 0 for words of an expert."""
    advantages: Tensor
    sequence: Tensor
    """int64: the row of each token, rising."""
    counts: Tensor
    """Replies that the token's row stands for."""
    expert: Tensor
    """bool: an expert's words, not the policy's."""
    weights: Tensor
    """w of the aggregate over all rows; those of one reply of each row."""
    policy_weights: Tensor
    """The same as if only the policy's rows were there; 0 at an expert's."""
    expert_weights: Tensor
    """The same of the expert's rows."""
    reference: Tensor | None = None
    pairs: Tensor | None = None
    """int64 [pairs, 2] the chosen and the rejected row, for preferences."""
    step: int = 1
    """Of the run, from 1."""

    def row_mean(self, values: Tensor) -> Tensor:
        """[T]: each token's row's mean."""
        rows = int(self.sequence[-1]) + 1
        zeros = torch.zeros(rows, dtype=values.dtype)
        sums = zeros.index_add(0, self.sequence, values)
        return (sums / zeros.index_add(0, self.sequence, torch.ones_like(values)))[self.sequence]

    def select_rows(self, kept: Tensor) -> Tokens:
        """The tokens of the rows in `kept` (bool [rows]) with the weights that they have among all; no pairs."""
        inside = kept[self.sequence]
        number = torch.cumsum(kept.long(), 0) - 1
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
            step=self.step,
        )


def aggregate_weights(aggregate: Aggregate, sequence: Tensor, counts: Tensor, among: Tensor) -> Tensor:
    """w float64 [T] of the tokens in `among` (bool [T]), 0 elsewhere; a row of count c is c replies in every mean."""
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


Losses = tuple[Tensor, dict[str, Tensor]]
"""A loss to be minimized, and numbers worth a look."""


class PolicyLoss(Settings):
    """What every policy loss has.

    `linear`: the losses of equal replies with two advantages are that of one with their sum, so they may share a row;
    of losses that `advantage_kink`, where both advantages and their sum are on one side.
    """

    linear: ClassVar[bool] = True
    reads_reference: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = True

    @property
    def advantage_kink(self) -> float | None:
        """The advantage at which the loss, linear on both sides, has a kink; None if it is linear."""
        return None

    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """l [T], and numbers worth a look."""
        raise NotImplementedError

    def total(self, logprobs: Tensor, batch: Tokens) -> Losses:
        """sum w_t l_t."""
        values, metrics = self.tokens(logprobs, batch)
        return (batch.weights * values).sum(), metrics


def log_ratio(logprobs: Tensor, batch: Tokens) -> Tensor:
    """log of the ratio, within 20."""
    return (logprobs - batch.old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_fraction(where: Tensor, batch: Tokens) -> Tensor:
    """The share of tokens at which something is so."""
    return (where.to(batch.old) * batch.counts).sum() / batch.counts.sum().clamp(min=1.0)
