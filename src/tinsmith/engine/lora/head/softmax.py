"""Softmax of rows of logits: log-probabilities, and what scores and their gradients need of a row.

With PyTorch's operators, which on a CPU overwrite the logits, because 31 MB of new pages cost more than computing in
them; on a GPU with a kernel that reads them once, and once more for the probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SoftmaxRows:
    """Of each row of logits [R, V], in float32."""

    log_sums: Tensor
    """[R]: the logarithm of the sum of exp(logit)."""
    entropies: Tensor | None
    """[R]."""
    probs: Tensor | None
    """[R, V], in the dtype that was requested."""


class SoftmaxOfRows(Protocol):
    """Computes these; may overwrite the logits (float32 [R, V]) and return their memory."""

    def __call__(self, logits: Tensor, *, entropies: bool, probs: torch.dtype | None) -> SoftmaxRows: ...


def log_softmax(logits: Tensor) -> Tensor:
    """float32 [R, V] -> float32 [R, V], exact to float32's rounding.

    On CPUs PyTorch's own adds the terms of a row sequentially (with AVX2 eight sums at once) and loses small terms
    beside large ones: an error of 2e-5 over 49,152 tokens. There its result is normalized once more, with `sum`, which
    adds pairwise.
    """
    scores = torch.log_softmax(logits, 1)
    return scores.sub_(scores.exp().sum(1, keepdim=True).log_()) if scores.device.type == "cpu" else scores


def softmax_of_rows(logits: Tensor, *, entropies: bool, probs: torch.dtype | None) -> SoftmaxRows:
    """With PyTorch's operators."""
    top = logits.amax(1)
    shifted = logits - top[:, None] if entropies else None
    values = torch.softmax(logits, 1, out=logits)
    total = values.sum(1)
    log_sum = total.log() - values.amax(1).log_()  # log sum(exp(logit - top)); `total`: see `log_softmax`
    entropy = None if shifted is None else log_sum - shifted.mul_(values).sum(1) / total
    return SoftmaxRows(top + log_sum, entropy, None if probs is None else values.to(probs))
