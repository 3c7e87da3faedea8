"""From logits to tokens: one pass over a batch whose rows have their own temperature, top_k, top_p and random numbers.

A token is drawn by inverting the cumulative distribution at one uniform number per row, so a row's draws depend on its
own seed alone and not on who else is in the batch. Logprobs are those of softmax(logits / temperature), untempered at
temperature 0 (greedy); top_k and top_p choose among fewer tokens but do not renormalise them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import TopK

_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Rule:
    """How one row is drawn."""

    temperature: float
    top_k: int
    top_p: float

    @property
    def narrowed(self) -> bool:
        """Whether fewer than all tokens may be drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens int64 [B], their logprobs float32 [B], and all logprobs [B, V] for those who ask for the top ones."""

    tokens: Tensor
    logprobs: Tensor
    all: Tensor


def stream(seed: int, sample: int) -> np.random.Generator:
    """The uniform numbers of one sample of one request: the same for the same seed, others for each sample."""
    return np.random.Generator(np.random.Philox(key=np.array([seed & (2**64 - 1), sample], dtype=np.uint64)))


def choose(logits: Tensor, rules: Sequence[Rule], uniforms: Sequence[float]) -> Chosen:
    """logits float32 [B, V]; a rule and a number in [0, 1) for each row."""
    temperatures = torch.tensor([rule.temperature or 1.0 for rule in rules], device=logits.device)
    tempered = logits if bool((temperatures == 1).all()) else logits / temperatures[:, None]
    logprobs = torch.log_softmax(tempered, dim=1)
    where = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    tokens = _invert(logprobs.exp(), where)
    narrow = [row for row, rule in enumerate(rules) if rule.narrowed]
    if narrow:
        tokens[narrow] = _narrowed(logprobs[narrow], [rules[row] for row in narrow], where[narrow])
    greedy = [row for row, rule in enumerate(rules) if rule.temperature == 0]
    if greedy:
        tokens[greedy] = logits[greedy].argmax(dim=1)
    return Chosen(tokens, logprobs.gather(1, tokens[:, None])[:, 0], logprobs)


def top(logprobs: Tensor, k: int) -> TopK:
    """The k best of each row of [R, V], best first."""
    values, ids = logprobs.topk(k, dim=1)
    return TopK(token_ids=ids.int().cpu().numpy(), logprobs=values.cpu().numpy())


def draws(logits: Tensor, temperature: float, uniforms: np.ndarray) -> TopK:
    """For each row of logits [R, V] as many independent tokens as `uniforms` [R, k] has numbers, from all tokens."""
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=1)
    if temperature == 0:
        tokens = logits.argmax(dim=1, keepdim=True).expand(-1, uniforms.shape[1])
    else:
        chances, where = logprobs.exp(), torch.as_tensor(uniforms, device=logits.device)
        tokens = torch.stack([_invert(chances, column) for column in where.T], dim=1)
    return TopK(token_ids=tokens.int().cpu().numpy(), logprobs=logprobs.gather(1, tokens).cpu().numpy())


def _invert(chances: Tensor, where: Tensor) -> Tensor:
    """The token at which the cumulative sum of `chances` [B, V] passes `where` of the whole; sums of blocks first, so
    that rounding stays that of a few hundred numbers and only one block is summed token by token."""
    blocks = torch.nn.functional.pad(chances, (0, -chances.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    sums = blocks.sum(dim=2, dtype=torch.float32).double().cumsum(dim=1)
    goal = (where * sums[:, -1])[:, None]
    block = torch.searchsorted(sums, goal, right=True).clamp(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double()
    place = torch.searchsorted(inside.cumsum(dim=1), goal - before, right=True)
    # Rounding may leave the goal beyond the block's end: take its last token that can be drawn at all.
    last = _BLOCK - 1 - (inside > 0).flip(1).int().argmax(dim=1, keepdim=True)
    return (block * _BLOCK + torch.minimum(place, last))[:, 0]


def _narrowed(logprobs: Tensor, rules: Sequence[Rule], where: Tensor) -> Tensor:
    """Draw among each row's top_k, then among the fewest of those that together have top_p of their mass."""
    ordered, ids = logprobs.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    kept = torch.tensor([rule.top_k if rule.top_k > 0 else ordered.shape[1] for rule in rules], device=ordered.device)
    chances = ordered.double().exp() * (ranks < kept[:, None])
    mass = chances.cumsum(dim=1)
    limit = torch.tensor([rule.top_p for rule in rules], dtype=torch.float64, device=ordered.device)[:, None]
    chances *= (mass - chances) < limit * mass[:, -1:]
    drawn = _invert(chances, where)
    return ids.gather(1, drawn[:, None])[:, 0]
