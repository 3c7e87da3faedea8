"""From hidden states to logits and log-probabilities, in blocks of rows, without a float32 matrix [T, V].

Logits and log-softmax are float32 (`head.products`). `score` computes the log-probability of every target. For
positions that may have a gradient it saves the probabilities in the base's dtype, from which `backward` starts; these
positions are in blocks of their own, so that the others cost nothing in the backward. Entropies of the whole softmax
come from the same block.

`blocks` plans on the host where the targets are: neither `score` nor `backward` reads a value of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.load_checks import LoadChecks
from tinsmith.engine.lora import compiled_adapters
from tinsmith.engine.lora.adapter import AdapterWeights, LoraPair, PlacedAdapter
from tinsmith.engine.lora.adapter_groups import AdapterSlice
from tinsmith.engine.lora.head.blocks import PackedTargets, ScoreBlock, block_rows, plan_blocks
from tinsmith.engine.lora.head.choice import products_of, softmax_on
from tinsmith.engine.lora.head.products import Addition
from tinsmith.engine.model.logit_rule import LogitRule
from tinsmith.engine.model_parts import HEAD


@dataclass(frozen=True, slots=True)
class LogitsBlock:
    """Logits [R, V] of the packed positions from `first` on, each under its adapter of `placed`."""

    first: int
    logits: Tensor
    placed: tuple[PlacedAdapter, ...]
    """Positions within the block."""


@dataclass(frozen=True, slots=True)
class SavedProbs:
    """Probabilities [R, V] of a block's positions, for one backward."""

    block: ScoreBlock
    probs: Tensor
    rule_grad: Tensor | None = None
    """d logit / d product [R, V], where logits have a soft cap."""


@dataclass(frozen=True, slots=True)
class TargetScores:
    """float32 log-probabilities [M], in the order of the targets; entropies [T] of the whole softmax if requested."""

    logprobs: Tensor
    entropies: Tensor | None
    saved: list[SavedProbs]


@dataclass(frozen=True, slots=True)
class ScoreGrads:
    """Gradient of a loss: d / d logprob [M], and d / d entropy [T] if the loss depends on entropies."""

    logprobs: Tensor
    entropies: Tensor | None = None


class LMHead:
    """The base model's output weights [V, D]: float32 results forward, in the base's dtype backward."""

    def __init__(
        self,
        weight: Tensor,
        rule: LogitRule = LogitRule(),  # noqa: B008 - frozen
        rows: int | None = None,
        checks: LoadChecks | None = None,
    ) -> None:
        """`rows` are the most in a block, by default as many as suit the device; `checks` are the model's."""
        self._rule = rule
        self.block_rows = rows or block_rows(len(weight), weight.device)
        self._products = products_of(weight, None if rule.bias is None else rule.bias.float())
        self._compiled = compiled_adapters.work_on(weight.device, weight.dtype, weight.shape, checks)
        self._softmax = softmax_on(weight.device)

    def logits(self, hidden: Tensor, weights: AdapterWeights | None) -> Tensor:
        """[R, D] -> float32 [R, V], under one adapter or none."""
        return self.logits_under(hidden, [] if weights is None else [(weights, 0, len(hidden))])

    def blocks(self, hidden: Tensor, placed: Sequence[PlacedAdapter]) -> Iterator[LogitsBlock]:
        """The logits of every position of `hidden` [T, D], in blocks, in order."""
        for first in range(0, len(hidden), self.block_rows):
            rows = hidden[first : first + self.block_rows]
            adapters = tuple(_within(placed, first, first + len(rows)))
            yield LogitsBlock(first, self.logits_under(rows, adapters), adapters)

    def logits_with(self, hidden: Tensor, add: Callable[[Tensor, Tensor], None]) -> Tensor:
        """[R, D] -> float32 [R, V]; `add(hidden, products)` adds what adapters contribute to the products."""
        products = self._products(hidden)
        add(hidden, products)
        return self._rule.apply(products)

    def logits_under(self, hidden: Tensor, placed: Sequence[PlacedAdapter]) -> Tensor:
        """[R, D] -> float32 [R, V], under the adapters of spans of rows."""
        additions = [
            Addition(start, stop, pair.a, pair.b, weights.scale)
            for weights, start, stop in placed
            if (pair := weights.pairs.get(HEAD)) is not None
        ]
        return self._rule.apply(self._products(hidden, additions))

    @torch.no_grad()
    def score(
        self,
        hidden: Tensor,
        placed: Sequence[PlacedAdapter],
        targets: PackedTargets,
        grad_mask: np.ndarray | None = None,
        *,
        entropies: bool = False,
    ) -> TargetScores:
        """Log-probabilities of the targets, entropies if requested, and what the backward of `grad_mask` needs.

        `grad_mask` is bool [T]: positions that may have a gradient.
        """
        logprobs = torch.empty(len(targets.at), device=hidden.device)
        entropy = torch.zeros(len(hidden), device=hidden.device) if entropies else None
        saved: list[SavedProbs] = []
        for block in plan_blocks(len(hidden), placed, targets, grad_mask, self.block_rows, hidden.device):
            logits = self.logits_under(hidden[block.positions], block.placed)
            picked = logits[block.rows, block.ids]
            rule_grad = self._rule.gradient(logits, hidden.dtype) if block.has_grad else None
            softmax = self._softmax(logits, entropies=entropies, probs=hidden.dtype if block.has_grad else None)
            logprobs[block.numbers] = softmax.logprobs(block.rows, block.ids, picked)
            if entropy is not None and softmax.entropies is not None:
                entropy[block.positions] = softmax.entropies
            if softmax.probs is not None:
                saved.append(SavedProbs(block, softmax.probs, rule_grad))
            del logits, softmax  # the next block reuses this memory
        return TargetScores(logprobs, entropy, saved)

    @torch.no_grad()
    def backward(self, hidden: Tensor, scores: TargetScores, grads: ScoreGrads) -> Tensor:
        """d loss / d hidden [T, D]; adds the gradients of the head's adapters to their buffers.

        Overwrites `scores.saved`. `grads` must be zero where `grad_mask` was False.
        """
        hidden_grad = torch.zeros_like(hidden)
        for saved in scores.saved:
            logits_grad = _logits_grad(saved, grads.logprobs, _entropy_of(saved.block, scores, grads))
            if saved.rule_grad is not None:
                logits_grad *= saved.rule_grad
            elif self._rule.scale != 1:
                logits_grad *= self._rule.scale
            positions = saved.block.positions
            hidden_grad[positions] = self._hidden_grad(hidden[positions], saved.block.placed, logits_grad)
        return hidden_grad

    def _hidden_grad(self, hidden: Tensor, placed: Sequence[PlacedAdapter], logits_grad: Tensor) -> Tensor:
        """A block's d loss / d hidden [R, D]; adds the gradients of its adapters."""
        result = self._products.backward(logits_grad)
        rounded = [
            (_rounded(weights, hidden.dtype), start, stop) for weights, start, stop in placed if HEAD in weights.pairs
        ]
        compiled, others = compiled_adapters.compiled_groups(rounded) if self._compiled else ([], rounded)
        for group in (*compiled, *(AdapterSlice(*entry) for entry in others)):
            group.backward(result, [logits_grad], [HEAD], hidden, group.narrow_of(hidden, [HEAD]))
        return result


def _rounded(weights: AdapterWeights, dtype: torch.dtype) -> AdapterWeights:
    """The head's part of an adapter in a dtype, with its gradient buffers."""
    pair = weights.pairs[HEAD]
    gradients = {HEAD: weights.gradients[HEAD]} if weights.gradients else {}
    return AdapterWeights(weights.scale, {HEAD: LoraPair(pair.a.to(dtype), pair.b.to(dtype))}, gradients)


def _entropy_of(block: ScoreBlock, scores: TargetScores, grads: ScoreGrads) -> tuple[Tensor, Tensor] | None:
    """(entropy, d loss / d entropy) of a block's positions, or None if the loss does not depend on entropies."""
    if scores.entropies is None or grads.entropies is None:
        return None
    return scores.entropies[block.positions], grads.entropies[block.positions]


def _logits_grad(saved: SavedProbs, grads: Tensor, entropy: tuple[Tensor, Tensor] | None) -> Tensor:
    """d loss / d logits [R, V]; overwrites the block's probabilities.

    The gradient of sum g log_softmax(logits)[id] is g (onehot - p); that of e H(p) is -e p (log p + H).
    """
    block, probs = saved.block, saved.probs
    of_logprobs = grads[block.numbers]
    totals = torch.zeros(len(probs), device=probs.device).index_add_(0, block.rows, of_logprobs)
    entropy_term = None
    if entropy is not None:
        entropies, of_entropies = entropy
        totals += of_entropies * entropies
        # -p log p, 0 where p is 0.
        entropy_term = torch.special.entr(probs).mul_(of_entropies[:, None].to(probs.dtype))
    logits_grad = probs.mul_(-totals[:, None].to(probs.dtype))
    if entropy_term is not None:
        logits_grad += entropy_term
    return logits_grad.index_put_((block.rows, block.ids), of_logprobs.to(probs.dtype), accumulate=True)


def _within(placed: Sequence[PlacedAdapter], start: int, stop: int) -> Iterator[PlacedAdapter]:
    """The adapters of the positions start..stop, placed relative to `start`."""
    for weights, low, high in placed:
        if low < stop and high > start:
            yield weights, max(low, start) - start, min(high, stop) - start
