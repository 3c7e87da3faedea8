"""From hidden states to logits and logprobs, a few rows at a time: never a whole [T, V] in float32.

Logits are float32, and so is the log-softmax: the product sums in float32 (where the base is bfloat16, its values are
bfloat16 and so is what multiplies them; only the sums are wider). The forward serves every target. Where a gradient may
come, it keeps the row's probabilities in the base's dtype, for the backward to start from; rows that learn stand in
blocks of their own, and others cost nothing then. The softmax is made in the logits' own memory, for 31 MB of fresh
pages cost more than what is computed in them. Entropies are of the whole softmax, from the same block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith.engine.lora.adapter import HEAD, Placed, Weights
from tinsmith.engine.lora.matmul import Fixed

ROWS = 160
"""Rows of logits at once: 31 MB for a vocabulary of 49,152, which stays in the cache of a CPU."""


def log_softmax(logits: Tensor) -> Tensor:
    """float32 [R, V] -> float32 [R, V], exact to float32's rounding.

    PyTorch's own adds up a row lane by lane, and loses what is small beside what is great: over 49,152 tokens 2e-5 with
    AVX2. What it gives is summed once more, for `sum` adds in a tree.
    """
    scores = torch.log_softmax(logits, 1)
    return scores.sub_(scores.exp().sum(1, keepdim=True).log_())


@dataclass(frozen=True, slots=True)
class Targets:
    """M targets, each at a packed position; sorted by position."""

    at: Tensor
    """int64 [M]."""
    ids: Tensor
    """int64 [M]."""


@dataclass(frozen=True, slots=True)
class Block:
    """Logits [R, V] of the packed positions from `first` on, each under its adapter of `placed`."""

    first: int
    logits: Tensor
    placed: tuple[Placed, ...]
    """Positions within the block."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Probabilities [R, V] of the packed positions `rows` (int64 [R], rising), for one backward."""

    placed: tuple[Placed, ...]
    """By index in `rows`."""
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


class Head:
    """The base's output weights [V, D], in its dtype: float32 products forward, in the base's dtype backward."""

    def __init__(self, weight: Tensor) -> None:
        self._narrow, self._product = weight, Fixed(weight.float()).order(back=False)

    def logits(self, hidden: Tensor, weights: Weights | None) -> Tensor:
        """[R, D] -> float32 [R, V], under one adapter or none."""
        return self._logits(hidden, [] if weights is None else [(weights, 0, len(hidden))])

    def blocks(self, hidden: Tensor, placed: Sequence[Placed]) -> Iterator[Block]:
        """The logits of every position of `hidden` [T, D], a block at a time, in order."""
        for first in range(0, len(hidden), ROWS):
            rows = hidden[first : first + ROWS]
            mine = tuple(_clipped(placed, first, first + len(rows)))
            yield Block(first, self._logits(rows, mine), mine)

    def _logits(self, hidden: Tensor, placed: Sequence[Placed]) -> Tensor:
        wide = hidden.float()
        logits = self._product(wide)
        for weights, start, stop in placed:
            if HEAD in weights.pairs:
                pair = weights.pairs[HEAD]
                logits[start:stop].addmm_(wide[start:stop] @ pair.a.T, pair.b.T, alpha=weights.scale)
        return logits

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
        blocks = list(_blocks(len(hidden), learning, hidden.device))
        at, order = _in_order(targets, torch.cat([rows for rows, _ in blocks]))
        first = 0
        for rows, learns in blocks:
            low, high = torch.searchsorted(at, torch.tensor([first, first + len(rows)], device=at.device)).tolist()
            row, mine = at[low:high] - first, order[low:high]
            first += len(rows)
            if low == high:
                continue
            under = _among(placed, rows)
            logits = self._logits(hidden[rows], under)
            picked, top = logits[row, targets.ids[mine]], logits.amax(1)
            surprise = logits - top[:, None] if spread is not None else None
            chances = torch.softmax(logits, 1, out=logits)
            whole = chances.sum(1)
            totals = whole.log() - chances.amax(1).log_()  # log sum(exp(logit - top)); for `whole` see `log_softmax`
            result[mine] = picked - (top + totals)[row]
            if spread is not None and surprise is not None:
                spread[rows] = totals - surprise.mul_(chances).sum(1) / whole
            if learns:
                kept.append(Kept(under, rows, chances.to(hidden.dtype)))
            del logits, chances, surprise  # the next block is made in the same memory
        return Scored(result, spread, kept)

    @torch.no_grad()
    def backward(self, hidden: Tensor, scored: Scored, targets: Targets, gradient: Slopes) -> Tensor:
        """d loss / d hidden [T, D]; the head's adapters get their gradients on the way.

        `scored.kept` is used up. The gradient must be zero where `learning` was false.
        """
        result = torch.zeros_like(hidden)
        for block in scored.kept:
            low, high = torch.searchsorted(targets.at, block.rows[[0, -1]] + self._ends).tolist()
            at, ids, slopes = targets.at[low:high], targets.ids[low:high], gradient.logprobs[low:high]
            inside = slopes != 0
            rows, ids, slopes = torch.searchsorted(block.rows, at[inside]), ids[inside], slopes[inside]
            slope = _slope(block, rows, ids, slopes, _spread(block, scored, gradient))
            result[block.rows] = _back(hidden[block.rows], self._narrow, block, slope)
        return result

    @property
    def _ends(self) -> Tensor:
        return torch.tensor([0, 1], device=self._narrow.device)


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
    for weights, start, stop in block.placed:
        if HEAD not in weights.pairs:
            continue
        pair, rows = weights.pairs[HEAD], slice(start, stop)
        narrow, wide = slope[rows] @ pair.b.to(hidden.dtype), hidden[rows] @ pair.a.to(hidden.dtype).T
        result[rows].addmm_(narrow, pair.a.to(hidden.dtype), alpha=weights.scale)
        if weights.gradients:
            into = weights.gradients[HEAD]
            into.a.add_(narrow.T @ hidden[rows], alpha=weights.scale)
            into.b.add_(slope[rows].T @ wide, alpha=weights.scale)
    return result


def _blocks(count: int, learning: Tensor | None, device: torch.device) -> Iterator[tuple[Tensor, bool]]:
    """The positions below `count` in blocks (int64 [R], rising), and whether they learn: first those that do."""
    learns = torch.zeros(count, dtype=torch.bool, device=device) if learning is None else learning
    for rows, whether in ((learns.nonzero()[:, 0], True), ((~learns).nonzero()[:, 0], False)):
        if len(rows):
            yield from ((block, whether) for block in rows.tensor_split(-(-len(rows) // ROWS)))


def _in_order(targets: Targets, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Where in `rows`, an order of all positions, each target stands, rising; and which target that is."""
    place = torch.empty_like(rows)
    place[rows] = torch.arange(len(rows), device=rows.device)
    at = place[targets.at].sort(stable=True)
    return at.values, at.indices


def _among(placed: Sequence[Placed], rows: Tensor) -> tuple[Placed, ...]:
    """The adapters of some positions (int64 [R], rising), by index in `rows`."""
    edges = torch.tensor([[start, stop] for _, start, stop in placed], device=rows.device).reshape(-1, 2)
    found = zip(placed, torch.searchsorted(rows, edges).tolist(), strict=True)
    return tuple((weights, low, high) for (weights, _, _), (low, high) in found if low < high)


def _clipped(placed: Sequence[Placed], start: int, stop: int) -> Iterator[Placed]:
    """The adapters of the positions start..stop, counted from `start`."""
    for weights, low, high in placed:
        if low < stop and high > start:
            yield weights, max(low, start) - start, min(high, stop) - start
