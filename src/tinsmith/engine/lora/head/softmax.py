"""Softmax of rows of logits: log-probabilities, and what scores and their gradients need of a row.

With PyTorch's operators, which on a CPU overwrite the logits, because 31 MB of new pages cost more than computing in
them; on a GPU with a kernel that reads them once, and once more for the probabilities.

On a CPU the sampler and the trainer compute a logprob by the same functions, whose results for a row do not depend on
how many rows and threads there are: from the same logits, both get the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tinsmith.engine.model.memory import from_heap
from tinsmith.engine.model.precision import cumulative_sum

SUM_BLOCK = 256
"""Probabilities that are added in float32."""
LEAST_PROBABILITY = 1e-30
"""The logprob of a smaller one is computed from its logit, because float32 does not represent them all."""


@dataclass(frozen=True, slots=True)
class SoftmaxRows:
    """Of each row of logits [R, V], in float32."""

    log_sums: Tensor
    """[R]: the logarithm of the sum of exp(logit)."""
    entropies: Tensor | None
    """[R]."""
    probs: Tensor | None
    """[R, V], in the dtype that was requested."""
    values: Tensor | None = None
    """[R, V]: the probabilities before they are rounded, on a CPU."""
    totals: Tensor | None = None
    """float64 [R]: their sums, which are 1 but for rounding."""

    def logprobs(self, rows: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
        """Those of ids [M] in these rows [M], which have these logits [M]."""
        scores = logits - self.log_sums[rows]
        if self.values is None or self.totals is None:
            return scores
        picked = self.values[rows, ids]
        return torch.where(picked > LEAST_PROBABILITY, logprobs_of(picked, self.totals[rows]), scores)


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


def block_sums(probs: Tensor) -> Tensor:
    """float64 [R, ceil(V / SUM_BLOCK)]: sums of the blocks of probabilities float32 [R, V]."""
    whole = probs.shape[1] - probs.shape[1] % SUM_BLOCK
    parts = [probs[:, :whole].unflatten(1, (-1, SUM_BLOCK)).sum(2)] if whole else []
    if whole < probs.shape[1]:
        parts.append(probs[:, whole:].sum(1, keepdim=True))
    return torch.cat(parts, 1).double()


def logprobs_of(probs: Tensor, totals: Tensor) -> Tensor:
    """The logprobs, float32, of probabilities float32 whose rows have these totals, float64."""
    return (probs.double().log() - totals.log()).float()


def softmax_of_rows(logits: Tensor, *, entropies: bool, probs: torch.dtype | None) -> SoftmaxRows:
    """With PyTorch's operators."""
    top = logits.amax(1)
    shifted = logits - top[:, None] if entropies else None
    values = torch.softmax(logits, 1, out=logits)
    totals = cumulative_sum(block_sums(values))[:, -1]
    total = totals.float()
    log_sum = total.log() - values.amax(1).log_()  # log sum(exp(logit - top)); `total`: see `log_softmax`
    entropy = None if shifted is None else log_sum - shifted.mul_(values).sum(1) / total
    with from_heap(0 if probs is None else probs.itemsize * values.numel()):
        rounded = None if probs is None else values.to(probs)
    return SoftmaxRows(top + log_sum, entropy, rounded, *([values, totals] if values.device.type == "cpu" else []))
