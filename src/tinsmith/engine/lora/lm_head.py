"""From hidden states to logits and log-probabilities, in blocks of rows, without a float32 matrix [T, V].

Logits and log-softmax are float32; the product accumulates in float32 (if the base is bfloat16, both factors are
bfloat16 values). `score` computes the log-probability of every target. For positions that may have a gradient it saves
the probabilities in the base's dtype, from which `backward` starts; these positions are in blocks of their own, so that
the others cost nothing in the backward. The softmax overwrites the logits, because 31 MB of new pages cost more than
computing in them. Entropies of the whole softmax come from the same block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith.engine.lora.adapter import AdapterWeights, PlacedAdapter
from tinsmith.engine.lora.matmul import FrozenLinear
from tinsmith.engine.model.logit_rule import LogitRule
from tinsmith.engine.model_parts import HEAD

BLOCK_ROWS = 160
"""Rows of logits in a block: 31 MB for a vocabulary of 49,152, which stays in a CPU's cache."""


def log_softmax(logits: Tensor) -> Tensor:
    """float32 [R, V] -> float32 [R, V], exact to float32's rounding.

    PyTorch's own adds the terms of a row sequentially (with AVX2 eight sums at once) and loses small terms beside large
    ones: an error of 2e-5 over 49,152 tokens. Its result is normalized once more here, with `sum`, which adds pairwise.
    """
    scores = torch.log_softmax(logits, 1)
    return scores.sub_(scores.exp().sum(1, keepdim=True).log_())


@dataclass(frozen=True, slots=True)
class PackedTargets:
    """M targets, each at a packed position; sorted by position."""

    at: Tensor
    """int64 [M]."""
    ids: Tensor
    """int64 [M]."""


@dataclass(frozen=True, slots=True)
class LogitsBlock:
    """Logits [R, V] of the packed positions from `first` on, each under its adapter of `placed`."""

    first: int
    logits: Tensor
    placed: tuple[PlacedAdapter, ...]
    """Positions within the block."""


@dataclass(frozen=True, slots=True)
class SavedProbs:
    """Probabilities [R, V] of the packed positions `rows` (int64 [R], rising), for one backward."""

    placed: tuple[PlacedAdapter, ...]
    """Positions are indices in `rows`."""
    rows: Tensor
    probs: Tensor
    rule_grad: Tensor | None = None
    """d logit / d product [R, V], where logits have a soft cap."""


@dataclass(frozen=True, slots=True)
class TargetScores:
    """float32 log-probabilities [M] of the targets and, if requested, entropies [T] of the whole softmax."""

    logprobs: Tensor
    entropies: Tensor | None
    saved: list[SavedProbs]


@dataclass(frozen=True, slots=True)
class ScoreGrads:
    """Gradient of a loss: d / d logprob [M], and d / d entropy [T] if the loss depends on entropies."""

    logprobs: Tensor
    entropies: Tensor | None = None


class LMHead:
    """The base model's output weights [V, D]: float32 products forward, in the base's dtype backward."""

    def __init__(self, weight: Tensor, rule: LogitRule = LogitRule()) -> None:  # noqa: B008 - frozen
        self._weight, self._rule = weight, rule
        bias = None if rule.bias is None else rule.bias.float()
        self._frozen = FrozenLinear(weight.float(), bias).reorder(backward=False)

    def logits(self, hidden: Tensor, weights: AdapterWeights | None) -> Tensor:
        """[R, D] -> float32 [R, V], under one adapter or none."""
        return self._logits(hidden, [] if weights is None else [(weights, 0, len(hidden))])

    def blocks(self, hidden: Tensor, placed: Sequence[PlacedAdapter]) -> Iterator[LogitsBlock]:
        """The logits of every position of `hidden` [T, D], in blocks, in order."""
        for first in range(0, len(hidden), BLOCK_ROWS):
            rows = hidden[first : first + BLOCK_ROWS]
            adapters = tuple(_within(placed, first, first + len(rows)))
            yield LogitsBlock(first, self._logits(rows, adapters), adapters)

    def _logits(self, hidden: Tensor, placed: Sequence[PlacedAdapter]) -> Tensor:
        wide = hidden.float()
        logits = self._frozen(wide)
        for weights, start, stop in placed:
            if HEAD in weights.pairs:
                pair = weights.pairs[HEAD]
                logits[start:stop].addmm_(wide[start:stop] @ pair.a.T, pair.b.T, alpha=weights.scale)
        return self._rule.apply(logits)

    @torch.no_grad()
    def score(
        self,
        hidden: Tensor,
        placed: Sequence[PlacedAdapter],
        targets: PackedTargets,
        grad_mask: Tensor | None = None,
        *,
        entropies: bool = False,
    ) -> TargetScores:
        """Log-probabilities of the targets, entropies if requested, and what the backward of `grad_mask` needs.

        `grad_mask` is bool [T]: positions that may have a gradient.
        """
        logprobs = torch.empty(len(targets.at), device=hidden.device)
        entropy = torch.zeros(len(hidden), device=hidden.device) if entropies else None
        saved: list[SavedProbs] = []
        blocks = list(_blocks(len(hidden), grad_mask, hidden.device))
        at, order = _in_block_order(targets, torch.cat([rows for rows, _ in blocks]))
        first = 0
        for rows, has_grad in blocks:
            low, high = torch.searchsorted(at, torch.tensor([first, first + len(rows)], device=at.device)).tolist()
            row, numbers = at[low:high] - first, order[low:high]
            first += len(rows)
            if low == high:
                continue
            adapters = _among(placed, rows)
            logits = self._logits(hidden[rows], adapters)
            picked, top = logits[row, targets.ids[numbers]], logits.amax(1)
            rule_grad = self._rule.gradient(logits, hidden.dtype) if has_grad else None
            shifted = logits - top[:, None] if entropy is not None else None
            probs = torch.softmax(logits, 1, out=logits)
            total = probs.sum(1)
            log_sum = total.log() - probs.amax(1).log_()  # log sum(exp(logit - top)); `total`: see `log_softmax`
            logprobs[numbers] = picked - (top + log_sum)[row]
            if entropy is not None and shifted is not None:
                entropy[rows] = log_sum - shifted.mul_(probs).sum(1) / total
            if has_grad:
                saved.append(SavedProbs(adapters, rows, probs.to(hidden.dtype), rule_grad))
            del logits, probs, shifted  # the next block reuses this memory
        return TargetScores(logprobs, entropy, saved)

    @torch.no_grad()
    def backward(self, hidden: Tensor, scores: TargetScores, targets: PackedTargets, grads: ScoreGrads) -> Tensor:
        """d loss / d hidden [T, D]; adds the gradients of the head's adapters to their buffers.

        Overwrites `scores.saved`. `grads` must be zero where `grad_mask` was False.
        """
        hidden_grad = torch.zeros_like(hidden)
        for block in scores.saved:
            low, high = torch.searchsorted(targets.at, block.rows[[0, -1]] + self._range).tolist()
            at, ids, of_logprobs = targets.at[low:high], targets.ids[low:high], grads.logprobs[low:high]
            inside = of_logprobs != 0
            rows, ids, of_logprobs = torch.searchsorted(block.rows, at[inside]), ids[inside], of_logprobs[inside]
            logits_grad = _logits_grad(block, rows, ids, of_logprobs, _entropy_of(block, scores, grads))
            if block.rule_grad is not None:
                logits_grad *= block.rule_grad
            elif self._rule.scale != 1:
                logits_grad *= self._rule.scale
            hidden_grad[block.rows] = _hidden_grad(hidden[block.rows], self._weight, block, logits_grad)
        return hidden_grad

    @property
    def _range(self) -> Tensor:
        return torch.tensor([0, 1], device=self._weight.device)


def _entropy_of(block: SavedProbs, scores: TargetScores, grads: ScoreGrads) -> tuple[Tensor, Tensor] | None:
    """(entropy, d loss / d entropy) of a block's rows, or None if the loss does not depend on entropies."""
    if scores.entropies is None or grads.entropies is None:
        return None
    return scores.entropies[block.rows], grads.entropies[block.rows]


def _logits_grad(
    block: SavedProbs, rows: Tensor, ids: Tensor, of_logprobs: Tensor, entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """d loss / d logits [R, V]; overwrites the block's probabilities.

    The gradient of sum g log_softmax(logits)[id] is g (onehot - p); that of e H(p) is -e p (log p + H).
    """
    probs = block.probs
    totals = torch.zeros(len(probs), device=probs.device).index_add_(0, rows, of_logprobs)
    entropy_term = None
    if entropy is not None:
        entropies, of_entropies = entropy
        totals += of_entropies * entropies
        # -p log p, 0 where p is 0.
        entropy_term = torch.special.entr(probs).mul_(of_entropies[:, None].to(probs.dtype))
    logits_grad = probs.mul_(-totals[:, None].to(probs.dtype))
    if entropy_term is not None:
        logits_grad += entropy_term
    return logits_grad.index_put_((rows, ids), of_logprobs.to(probs.dtype), accumulate=True)


def _hidden_grad(hidden: Tensor, weight: Tensor, block: SavedProbs, logits_grad: Tensor) -> Tensor:
    """A block's d loss / d hidden [R, D]; adds the gradients of its adapters."""
    result = logits_grad @ weight
    for weights, start, stop in block.placed:
        if HEAD not in weights.pairs:
            continue
        pair, rows = weights.pairs[HEAD], slice(start, stop)
        narrow_grad, narrow = logits_grad[rows] @ pair.b.to(hidden.dtype), hidden[rows] @ pair.a.to(hidden.dtype).T
        result[rows].addmm_(narrow_grad, pair.a.to(hidden.dtype), alpha=weights.scale)
        if weights.gradients:
            buffer = weights.gradients[HEAD]
            buffer.a.add_(narrow_grad.T @ hidden[rows], alpha=weights.scale)
            buffer.b.add_(logits_grad[rows].T @ narrow, alpha=weights.scale)
    return result


def _blocks(count: int, grad_mask: Tensor | None, device: torch.device) -> Iterator[tuple[Tensor, bool]]:
    """The positions below `count` in blocks (int64 [R], rising), first those with a gradient, and which these are."""
    mask = torch.zeros(count, dtype=torch.bool, device=device) if grad_mask is None else grad_mask
    for rows, has_grad in ((mask.nonzero()[:, 0], True), ((~mask).nonzero()[:, 0], False)):
        if len(rows):
            yield from ((block, has_grad) for block in rows.tensor_split(-(-len(rows) // BLOCK_ROWS)))


def _in_block_order(targets: PackedTargets, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each target's index in `rows`, an order of all positions, rising; and the number of that target."""
    place = torch.empty_like(rows)
    place[rows] = torch.arange(len(rows), device=rows.device)
    at = place[targets.at].sort(stable=True)
    return at.values, at.indices


def _among(placed: Sequence[PlacedAdapter], rows: Tensor) -> tuple[PlacedAdapter, ...]:
    """The adapters of some positions (int64 [R], rising), placed by index in `rows`."""
    edges = torch.tensor([[start, stop] for _, start, stop in placed], device=rows.device).reshape(-1, 2)
    ranges = zip(placed, torch.searchsorted(rows, edges).tolist(), strict=True)
    return tuple((weights, low, high) for (weights, _, _), (low, high) in ranges if low < high)


def _within(placed: Sequence[PlacedAdapter], start: int, stop: int) -> Iterator[PlacedAdapter]:
    """The adapters of the positions start..stop, placed relative to `start`."""
    for weights, low, high in placed:
        if low < stop and high > start:
            yield weights, max(low, start) - start, min(high, stop) - start
