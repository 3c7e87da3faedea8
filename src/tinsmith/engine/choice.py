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
from tinsmith.engine.head import log_softmax

_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Rule:
    """How one row is drawn."""

    temperature: float
    top_k: int
    top_p: float
    tops: int = 0
    """How many of the likeliest tokens are wanted beside the drawn one."""

    @property
    def narrowed(self) -> bool:
        """Whether fewer than all tokens may be drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens int64 [B] and their logprobs float32 [B]; the likeliest tokens of those rows that ask for them."""

    tokens: Tensor
    logprobs: Tensor
    tops: tuple[TopK | None, ...]


def stream(seed: int, sample: int) -> np.random.Generator:
    """The uniform numbers of one sample of one request: the same for the same seed, others for each sample."""
    return np.random.Generator(np.random.Philox(key=np.array([seed & (2**64 - 1), sample], dtype=np.uint64)))


def choose(logits: Tensor, rules: Sequence[Rule], uniforms: Sequence[float]) -> Chosen:
    """logits float32 [B, V], which are used up; a rule and a number in [0, 1) for each row.

    Everything happens in the logits' own memory: on a CPU a fresh tensor of this size costs more than its arithmetic.
    """
    if any(rule.temperature not in (0, 1) for rule in rules):
        logits.div_(torch.tensor([rule.temperature or 1.0 for rule in rules], device=logits.device)[:, None])
    greedy = [row for row, rule in enumerate(rules) if rule.temperature == 0]
    best = logits[greedy].argmax(dim=1) if greedy else None
    asked = [row for row, rule in enumerate(rules) if rule.tops]
    logprobs = dict(zip(asked, log_softmax(logits[asked]), strict=True)) if asked else {}
    chances = torch.softmax(logits, dim=1, out=logits)
    where = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    tokens, totals = _invert(chances, where)
    narrow = [row for row, rule in enumerate(rules) if rule.narrowed]
    if narrow:
        tokens[narrow] = _narrowed(chances[narrow], [rules[row] for row in narrow], where[narrow])
    if best is not None:
        tokens[greedy] = best
    found = chances.gather(1, tokens[:, None])[:, 0].double().log() - totals.log()
    tops = tuple(top(logprobs[row][None], rule.tops) if rule.tops else None for row, rule in enumerate(rules))
    return Chosen(tokens, found.float(), tops)


def top(logprobs: Tensor, k: int) -> TopK:
    """The k best of each row of [R, V], best first."""
    values, ids = logprobs.topk(k, dim=1)
    return TopK(token_ids=ids.int().cpu().numpy(), logprobs=values.cpu().numpy())


def draws(logits: Tensor, temperature: float, uniforms: np.ndarray) -> TopK:
    """For each row of logits [R, V] as many independent tokens as `uniforms` [R, k] has numbers, from all tokens."""
    logprobs = log_softmax(logits / (temperature or 1.0))
    if temperature == 0:
        tokens = logits.argmax(dim=1, keepdim=True).expand(-1, uniforms.shape[1])
    else:
        chances, where = logprobs.exp(), torch.as_tensor(uniforms, device=logits.device)
        tokens = torch.stack([_invert(chances, column)[0] for column in where.T], dim=1)
    return TopK(token_ids=tokens.int().cpu().numpy(), logprobs=logprobs.gather(1, tokens).cpu().numpy())


def _invert(chances: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """The token at which the cumulative sum of `chances` [B, V] passes `where` of it all; and all of it, float64 [B].

    Sums of blocks first, so that rounding stays that of a few hundred numbers and only one block is summed token by
    token.
    """
    idle = -chances.shape[1] % _BLOCK
    whole = torch.nn.functional.pad(chances, (0, idle)) if idle else chances
    blocks = whole.unflatten(1, (-1, _BLOCK))
    sums = blocks.sum(dim=2).double().cumsum(dim=1)
    goal = (where * sums[:, -1])[:, None]
    block = torch.searchsorted(sums, goal, right=True).clamp(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double()
    place = torch.searchsorted(inside.cumsum(dim=1), goal - before, right=True)
    # Rounding may leave the goal beyond the block's end: take its last token that can be drawn at all.
    last = _BLOCK - 1 - (inside > 0).flip(1).int().argmax(dim=1, keepdim=True)
    return (block * _BLOCK + torch.minimum(place, last))[:, 0], sums[:, -1]


def _narrowed(chances: Tensor, rules: Sequence[Rule], where: Tensor) -> Tensor:
    """Draw among each row's top_k, then among the fewest of those that together have top_p of their mass."""
    ordered, ids = chances.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    kept = torch.tensor([rule.top_k if rule.top_k > 0 else ordered.shape[1] for rule in rules], device=ordered.device)
    among = ordered.double() * (ranks < kept[:, None])
    mass = among.cumsum(dim=1)
    limit = torch.tensor([rule.top_p for rule in rules], dtype=torch.float64, device=ordered.device)[:, None]
    among *= (mass - among) < limit * mass[:, -1:]
    drawn, _ = _invert(among, where)
    return ids.gather(1, drawn[:, None])[:, 0]
