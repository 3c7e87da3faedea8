"""Base class of policy losses: a loss for each token, and the weights of the aggregate that sum them up.

The T tokens of all rows of an update are concatenated; `sequence` is the row of each. The loss is the sum of w_t l_t
with the weights of the aggregate, so means cover the whole batch, however its rows are split into requests. Arrays
are float64, of NumPy or of PyTorch (`arrays`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

import numpy as np

from tinsmith.rl.algorithms.arrays import Array, at_least_one, library_of, sums_of_rows
from tinsmith.settings import Settings

Aggregate = Literal["token_sum", "token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]

LOG_RATIO_LIMIT = 20.0
"""Bound of a log ratio before it is exponentiated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """All tokens of an update; arrays are [T] and rows count from 0."""

    old: Array
    """Logprobs of the sampling policy; 0 at tokens of demonstrations."""
    advantages: Array
    sequence: Array
    """int64: the row of each token, in ascending order."""
    counts: Array
    """Number of identical replies merged into the token's row."""
    expert: Array
    """bool: whether the token is of a demonstration rather than the policy."""
    weights: Array
    """Weights w of the aggregate over all rows, for one reply of each row."""
    policy_weights: Array
    """Weights of the aggregate over the policy's rows alone; 0 at demonstrations."""
    expert_weights: Array
    """Weights of the aggregate over demonstrations alone; 0 at the policy's tokens."""
    reference: Array | None = None
    """Logprobs of the reference."""
    proximal: Array | None = None
    """Logprobs of the trained policy before the first update of the batch; None if it has one update."""
    teacher_top: Array | None = None
    """[T, K]: logprobs of the teacher's K likeliest tokens, by the teacher."""
    student_top: Array | None = None
    """[T, K]: logprobs of the same tokens by the trained policy; None where only its own tokens are scored."""
    pairs: Array | None = None
    """int64 [pairs, 2]: rows of the chosen and the rejected reply of each pair."""
    desirable: Array | None = None
    """int64 [rows]: rows of replies with the label that they are good; None if there are no replies with labels."""
    undesirable: Array | None = None
    """int64 [rows]: rows of replies with the label that they are bad; None if there are no replies with labels."""
    mismatched: Array | None = None
    """int64 [rows]: rows of replies after the prompts of other ones."""
    step: int = 1
    """Step of the run, from 1."""

    def row_mean(self, values: Array) -> Array:
        """[T]: the mean of `values` over the row of each token."""
        rows, ones = int(self.sequence[-1]) + 1, library_of(values).ones_like(values)
        sums, lengths = (sums_of_rows(each, self.sequence, rows) for each in (values, ones))
        return (sums / lengths)[self.sequence]

    def select_rows(self, selected: Array) -> Tokens:
        """The tokens of the `selected` rows (bool [rows]), with unchanged weights and without pairs."""
        inside = selected[self.sequence]
        number = library_of(selected).cumsum(selected, 0) - 1
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
            teacher_top=None if self.teacher_top is None else self.teacher_top[inside],
            student_top=None if self.student_top is None else self.student_top[inside],
            step=self.step,
        )

    def as_tensors(self) -> Tokens:
        """The same tokens in tensors of PyTorch, for losses with a gradient."""
        import torch

        arrays = {
            field.name: value for field in fields(self) if isinstance(value := getattr(self, field.name), np.ndarray)
        }
        return replace(self, **{name: torch.from_numpy(array) for name, array in arrays.items()})


def aggregate_weights(aggregate: Aggregate, sequence: Array, counts: Array, among: Array) -> Array:
    """Weights w, float64 [T], of the tokens in `among` (bool [T]); 0 elsewhere. A row of count c is c replies."""
    library = library_of(among)
    inside = library.asarray(among, dtype=library.float64)
    rows = int(sequence[-1]) + 1 if len(sequence) else 0
    lengths = sums_of_rows(inside, sequence, rows)
    replies = sums_of_rows(counts * inside, sequence, rows) / at_least_one(lengths)
    number = at_least_one(replies.sum())
    match aggregate:
        case "token_sum":
            return inside
        case "token_mean":
            return inside / at_least_one((lengths * replies).sum())
        case "seq_mean_token_sum":
            return inside / number
        case "seq_mean_token_mean":
            return inside / (number * at_least_one(lengths)[sequence])
        case "seq_mean_token_sum_norm":
            return inside / (number * at_least_one(lengths.max())) if rows else inside


SamplerRatio = Literal["none", "exact", "bounded"]
"""How a loss reads the sampler's logprobs: not at all, in an unbounded importance weight, or compared with the policy's
in any other way."""

Losses = tuple[Array, dict[str, Array]]
"""A loss to minimize, and its metrics."""


class PolicyLoss(Settings):
    """Base class of policy losses: their settings, and the loss of each token."""

    linear: ClassVar[bool] = True
    """Whether the loss is linear in the advantage, at least on each side of `advantage_kink`. Identical replies may
    then share a row with the sum of their advantages."""
    reads_reference: ClassVar[bool] = False
    """Whether the loss reads the reference's logprobs."""
    reads_teacher_top: ClassVar[bool] = False
    """Whether the loss reads the teacher's likeliest tokens."""
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

    def tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        """Losses l [T] for logprobs [T], and metrics."""
        raise NotImplementedError

    def total(self, logprobs: Array, batch: Tokens) -> Losses:
        """The loss of the batch, the sum of w_t l_t, and metrics."""
        values, metrics = self.tokens(logprobs, batch)
        return (batch.weights * values).sum(), metrics


def log_ratio(logprobs: Array, batch: Tokens) -> Array:
    """Log of the importance ratio [T], clipped to +-20."""
    return library_of(logprobs).clip(logprobs - batch.old, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def importance_ratio(logprobs: Array, batch: Tokens) -> Array:
    """The importance ratio [T], its log clipped to +-20."""
    return library_of(logprobs).exp(log_ratio(logprobs, batch))


def token_fraction(condition: Array, batch: Tokens) -> Array:
    """Fraction of tokens at which `condition` (bool [T]) holds."""
    return (condition * batch.counts).sum() / at_least_one(batch.counts.sum())
