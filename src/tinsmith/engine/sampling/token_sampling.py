"""From logits to tokens: one pass over a batch whose rows have their own temperature, top_k and top_p; one draw or many
from each row, each by a random number of its own.

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
from tinsmith.engine.lora.lm_head import log_softmax

FIRST = 4096
"""So many of a row's greatest chances are looked at before all are."""


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


def narrowed(chances: Tensor, rules: Sequence[Rule]) -> Tensor:
    """Chances float32 [R, V], with 0 for all but a row's top_k, and of these all but the fewest that together have
    top_p of their mass."""
    least, count = _ends(chances, rules, min(FIRST, chances.shape[1]))
    kept = chances >= least[:, None]
    too_many = kept.sum(dim=1) - count
    for row in too_many.nonzero()[:, 0].tolist():
        last = (chances[row] == least[row]).nonzero()[:, 0]
        kept[row, last[-int(too_many[row]) :]] = False
    return chances * kept


def _ends(chances: Tensor, rules: Sequence[Rule], size: int) -> tuple[Tensor, Tensor]:
    """The least chance that each row keeps float32 [R], and of how many tokens int64 [R]."""
    vocabulary, device = chances.shape[1], chances.device
    most = [min(rule.top_k, vocabulary) if rule.top_k > 0 else vocabulary for rule in rules]
    top_k = torch.tensor(most, device=device)[:, None]
    top_p = torch.tensor([rule.top_p for rule in rules], dtype=torch.float64, device=device)[:, None]
    values = _greatest(chances, size)
    among = values.double() * (torch.arange(size, device=device) < top_k)
    mass = among.cumsum(dim=1)
    whole = torch.where(top_k <= size, mass[:, -1:], chances.sum(dim=1, keepdim=True, dtype=torch.float64))
    count = ((mass - among) < top_p * whole).sum(dim=1).clamp(min=1)
    least = values.gather(1, count[:, None] - 1)[:, 0]
    unsure = (count == size) | ((top_k > size) & (top_k < vocabulary))[:, 0]
    if size < vocabulary and bool(unsure.any()):
        again = unsure.nonzero()[:, 0]
        least[again], count[again] = _ends(chances[again], [rules[row] for row in again.tolist()], vocabulary)
    return least, count


def _greatest(chances: Tensor, size: int) -> Tensor:
    """The `size` greatest of each row in order. On a CPU by NumPy, whose vector code is ten times as fast."""
    if chances.device.type != "cpu":
        return chances.topk(size, dim=1).values
    values = chances.numpy()
    if size < values.shape[1]:
        values = np.partition(values, -size, axis=1)[:, -size:]
    return torch.from_numpy(np.sort(values, axis=1)[:, ::-1].copy())


_BLOCK = 256
_TOGETHER = 16
"""Rows at once that top_k or top_p narrows: all of a row's tokens may have to be put in order, 40 bytes for each."""
_COLDEST = 1e-30


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens int64 [B] and their logprobs float32 [B]; for each draw the likeliest tokens, if its row asks for them."""

    tokens: Tensor
    logprobs: Tensor
    tops: tuple[TopK | None, ...]


def stream(seed: int, sample: int) -> np.random.Generator:
    """The uniform numbers of one sample of one request: the same for the same seed, others for each sample."""
    return np.random.Generator(np.random.Philox(key=np.array([seed & (2**64 - 1), sample], dtype=np.uint64)))


def choose(
    logits: Tensor, rules: Sequence[Rule], uniforms: Sequence[float], rows: Sequence[int] | None = None
) -> Chosen:
    """logits float32 [R, V], which are used up, and a rule for each row; a draw for each number in [0, 1), from the row
    that `rows` says, else one from each.

    Everything happens in the logits' own memory: on a CPU a fresh tensor of this size costs more than its arithmetic.
    """
    rows = range(len(rules)) if rows is None else rows
    if any(rule.temperature not in (0, 1) for rule in rules):
        logits.div_(torch.tensor([_divisor(rule.temperature) for rule in rules], device=logits.device)[:, None])
    greedy = [row for row, rule in enumerate(rules) if rule.temperature == 0]
    best = logits[greedy].argmax(dim=1) if greedy else None
    asked = [row for row, rule in enumerate(rules) if rule.tops]
    scores = log_softmax(logits[asked]) if asked else logits[:0]
    tops = {row: top(mine[None], rules[row].tops) for row, mine in zip(asked, scores, strict=True)}
    chances = torch.softmax(logits, dim=1, out=logits)
    where = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    whose = torch.tensor(rows, device=logits.device)
    tokens, totals = _invert(chances, where, whose)
    narrow = [row for row, rule in enumerate(rules) if rule.narrowed]
    for some in (narrow[first : first + _TOGETHER] for first in range(0, len(narrow), _TOGETHER)):
        draws, places = _among(some, rows)
        left = narrowed(chances[some], [rules[row] for row in some])
        tokens[draws], _ = _invert(left, where[draws], whose.new_tensor(places))
    if best is not None:
        draws, places = _among(greedy, rows)
        tokens[draws] = best[places]
    logprobs = chances[whose, tokens].double().log() - totals.log()
    return Chosen(tokens, logprobs.float(), tuple(tops.get(row) for row in rows))


def top(logprobs: Tensor, k: int) -> TopK:
    """The k best of each row of [R, V], best first."""
    values, ids = logprobs.topk(k, dim=1)
    return TopK(token_ids=ids.int().cpu().numpy(), logprobs=values.cpu().numpy())


def draws(logits: Tensor, temperature: float, uniforms: np.ndarray) -> TopK:
    """For each row of logits [R, V] as many independent tokens as `uniforms` [R, k] has numbers, from all tokens."""
    logprobs = log_softmax(logits / _divisor(temperature))
    if temperature == 0:
        tokens = logits.argmax(dim=1, keepdim=True).expand(-1, uniforms.shape[1])
    else:
        chances, where = logprobs.exp(), torch.as_tensor(uniforms, device=logits.device)
        whose = torch.arange(len(logits), device=logits.device)
        tokens = torch.stack([_invert(chances, column, whose)[0] for column in where.T], dim=1)
    return TopK(token_ids=tokens.int().cpu().numpy(), logprobs=logprobs.gather(1, tokens).cpu().numpy())


def _divisor(temperature: float) -> float:
    """What logits are divided by: untempered at 0, and a temperature so small that only the likeliest is drawn is not
    made smaller, for the quotients would overflow."""
    return max(temperature, _COLDEST) if temperature else 1.0


def _among(some: Sequence[int], rows: Sequence[int]) -> tuple[list[int], list[int]]:
    """Which draws are from some of the rows, and which of these each is from."""
    places = {row: place for place, row in enumerate(some)}
    draws = [draw for draw, row in enumerate(rows) if row in places]
    return draws, [places[rows[draw]] for draw in draws]


def _invert(chances: Tensor, where: Tensor, whose: Tensor) -> tuple[Tensor, Tensor]:
    """The token at which the cumulative sum of a row of `chances` [R, V] passes `where` [B] of it all; and all of it,
    float64 [B]. `whose` [B] says the row.

    Sums of blocks first, so that rounding stays that of a few hundred numbers and only one block is summed token by
    token.
    """
    idle = -chances.shape[1] % _BLOCK
    whole = torch.nn.functional.pad(chances, (0, idle)) if idle else chances
    blocks = whole.unflatten(1, (-1, _BLOCK))
    sums = blocks.sum(dim=2).double().cumsum(dim=1)[whose]
    goal = (where * sums[:, -1])[:, None]
    block = torch.searchsorted(sums, goal, right=True).clamp(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[whose, block[:, 0]].double()
    place = torch.searchsorted(inside.cumsum(dim=1), goal - before, right=True)
    # Rounding may leave the goal beyond the block's end: take its last token that can be drawn at all. Where nothing is
    # a number there is none, and any token will do.
    last = _BLOCK - 1 - (inside > 0).flip(1).int().argmax(dim=1, keepdim=True)
    found = (block * _BLOCK + torch.minimum(place, last))[:, 0]
    return found.clamp(max=chances.shape[1] - 1), sums[:, -1]
