"""From hidden states to logits and logprobs, a few rows at a time: never a whole [T, V] in float32.

Logits are float32, and so is the log-softmax: the head's weights are kept in float32, and the product sums in float32
(where the base is bfloat16, its values are bfloat16 and so is what multiplies them; only the sums are wider). The
forward serves every target. Where a gradient may come, it keeps the row's probabilities in the base's dtype, for the
backward to start from; other rows cost nothing then. Entropies are of the whole softmax, from the same block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith.engine.lora import HEAD, Placed, Weights

ROWS = 128
"""Rows of logits at once: 25 MB for a vocabulary of 49,152, which stays in the cache of a CPU."""


@dataclass(frozen=True, slots=True)
class Targets:
    """M targets, each at a packed position; sorted by position."""

    at: Tensor
    """int64 [M]."""
    ids: Tensor
    """int64 [M]."""


@dataclass(frozen=True, slots=True)
class Block:
    """Logits [R, V] of the packed positions from `first` on, all under one adapter."""

    first: int
    logits: Tensor
    weights: Weights | None


@dataclass(frozen=True, slots=True)
class Kept:
    """Probabilities [R, V] of the packed positions `rows` (int64 [R], rising), for one backward."""

    weights: Weights | None
    rows: Tensor
    chances: Tensor


@dataclass(frozen=True, slots=True)
class Scored:
    """float32 logprobs [M] of the targets; entropies [T] of the whole softmax (0 where not asked); for a backward."""

    logprobs: Tensor
    entropies: Tensor | None
    kept: list[Kept]


@dataclass(frozen=True, slots=True)
class Slopes:
    """The gradient of a loss: d / d logprob [M], and d / d entropy [T] if it has one."""

    logprobs: Tensor
    entropies: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """The base's output weights, float32 [V, D]."""

    weight: Tensor

    def logits(self, hidden: Tensor, weights: Weights | None) -> Tensor:
        """[R, D] -> float32 [R, V], under one adapter or none."""
        wide = hidden.float()
        logits = torch.nn.functional.linear(wide, self.weight)
        if weights is not None and HEAD in weights.pairs:
            pair = weights.pairs[HEAD]
            logits.addmm_(wide @ pair.a.T, pair.b.T, alpha=weights.scale)
        return logits

    def blocks(self, hidden: Tensor, placed: Sequence[Placed]) -> Iterator[Block]:
        """The logits of every position of `hidden` [T, D], a block at a time, in order."""
        for weights, start, stop in _covered(placed, len(hidden)):
            for first in range(start, stop, ROWS):
                yield Block(first, self.logits(hidden[first : min(first + ROWS, stop)], weights), weights)

    def together(self, hidden: Tensor, placed: Sequence[Placed]) -> Iterator[tuple[int, Tensor]]:
        """(first, logits [R, V]) of every position of `hidden` [T, D], in order, whatever adapters a block has: the
        base's product is one for all of them."""
        for first in range(0, len(hidden), ROWS):
            logits = self.logits(hidden[first : first + ROWS], None)
            for weights, start, stop in placed:
                rows = slice(max(start, first), min(stop, first + len(logits)))
                if rows.start < rows.stop and HEAD in weights.pairs:
                    pair = weights.pairs[HEAD]
                    narrow = hidden[rows].float() @ pair.a.T
                    logits[rows.start - first : rows.stop - first].addmm_(narrow, pair.b.T, alpha=weights.scale)
            yield first, logits

    @torch.no_grad()
    def score(
        self,
        hidden: Tensor,
        placed: Sequence[Placed],
        targets: Targets,
        learning: Tensor | None = None,
        *,
        entropies: bool = False,
    ) -> Scored:
        """Logprobs, and entropies if wanted; and what a backward needs of the rows in `learning` (bool [T])."""
        result = torch.empty(len(targets.at), device=hidden.device)
        spread = torch.zeros(len(hidden), device=hidden.device) if entropies else None
        kept: list[Kept] = []
        for block in self.blocks(hidden, placed):
            first, logprobs = block.first, torch.log_softmax(block.logits, dim=1)
            bounds = torch.tensor([first, first + len(logprobs)], device=hidden.device)
            low, high = torch.searchsorted(targets.at, bounds).tolist()
            if low == high:
                continue
            rows, ids = targets.at[low:high] - first, targets.ids[low:high]
            result[low:high] = logprobs[rows, ids]
            if spread is not None:
                spread[first : first + len(logprobs)] = -(logprobs.exp().mul_(logprobs)).sum(1)
            if learning is not None:
                learns = learning[first : first + len(logprobs)].nonzero()[:, 0]
                if len(learns):
                    chances = logprobs if len(learns) == len(logprobs) else logprobs[learns]
                    kept.append(Kept(block.weights, learns + first, chances.exp_().to(hidden.dtype)))
        return Scored(result, spread, kept)

    @torch.no_grad()
    def backward(self, hidden: Tensor, scored: Scored, targets: Targets, gradient: Slopes) -> Tensor:
        """d loss / d hidden [T, D]; the head's adapters get their gradients on the way.

        `scored.kept` is used up. The gradient must be zero where `learning` was false.
        """
        result = torch.zeros_like(hidden)
        weight = self.weight.to(hidden.dtype)
        for block in scored.kept:
            low, high = torch.searchsorted(targets.at, block.rows[[0, -1]] + self._ends).tolist()
            at, ids, slopes = targets.at[low:high], targets.ids[low:high], gradient.logprobs[low:high]
            inside = slopes != 0
            rows, ids, slopes = torch.searchsorted(block.rows, at[inside]), ids[inside], slopes[inside]
            slope = _slope(block, rows, ids, slopes, _spread(block, scored, gradient))
            result[block.rows] = _back(hidden[block.rows], weight, block, slope)
        return result

    @property
    def _ends(self) -> Tensor:
        return torch.tensor([0, 1], device=self.weight.device)


def _spread(block: Kept, scored: Scored, gradient: Slopes) -> tuple[Tensor, Tensor] | None:
    """(entropy, d loss / d entropy) of a block's rows, or None if the loss has no such gradient."""
    if scored.entropies is None or gradient.entropies is None:
        return None
    return scored.entropies[block.rows], gradient.entropies[block.rows]


def _slope(block: Kept, rows: Tensor, ids: Tensor, slopes: Tensor, spread: tuple[Tensor, Tensor] | None) -> Tensor:
    """d loss / d logits [R, V]; uses the block's probabilities up.

    That of sum g log_softmax(logits)[id] is g (onehot - p); that of e H(p) is -e p (log p + H).
    """
    chances = block.chances
    totals = torch.zeros(len(chances), device=chances.device).index_add_(0, rows, slopes)
    surprise = None
    if spread is not None:
        entropies, steep = spread
        totals += steep * entropies
        surprise = torch.special.entr(chances).mul_(steep[:, None].to(chances.dtype))  # -p log p, 0 where p is 0
    slope = chances.mul_(-totals[:, None].to(chances.dtype))
    if surprise is not None:
        slope += surprise
    return slope.index_put_((rows, ids), slopes.to(chances.dtype), accumulate=True)


def _back(hidden: Tensor, weight: Tensor, block: Kept, slope: Tensor) -> Tensor:
    """One block's share of d loss / d hidden [R, D]."""
    result = slope @ weight
    weights = block.weights
    if weights is not None and HEAD in weights.pairs:
        pair = weights.pairs[HEAD]
        narrow, wide = slope @ pair.b.to(hidden.dtype), hidden @ pair.a.to(hidden.dtype).T
        result.addmm_(narrow, pair.a.to(hidden.dtype), alpha=weights.scale)
        if weights.gradients:
            into = weights.gradients[HEAD]
            into.a.add_(narrow.T @ hidden, alpha=weights.scale)
            into.b.add_(slope.T @ wide, alpha=weights.scale)
    return result


def _covered(placed: Sequence[Placed], total: int) -> Iterator[tuple[Weights | None, int, int]]:
    """Positions 0..total by adapter, in order, with the stretches of the bare base model in between."""
    at = 0
    for weights, start, stop in placed:
        if at < start:
            yield None, at, start
        yield weights, start, stop
        at = stop
    if at < total:
        yield None, at, total
