"""From logits to tokens: one pass over a batch in which each row has its own temperature, top_k and top_p.

A token is drawn by inverting the cumulative distribution at one uniform number for each draw, so the draws of a row
depend on its own seed only and not on the rest of the batch. Logprobs are those of softmax(logits / temperature),
untempered at temperature 0 (greedy); top_k and top_p restrict the choice but do not renormalise the logprobs.

top_k and top_p are found without sorting whole rows. A row has a probability for each of 50,000 tokens or more, and
most nuclei are far smaller, so the largest probabilities are sorted first and a whole row only where these were too
few. Among tokens of equal probability the lower id comes first.

`sample_tokens` is for CPUs; `device_sampling` draws the same tokens on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import TopK
from tinsmith.engine.lora.head.softmax import SUM_BLOCK, block_sums, log_softmax, logprobs_of
from tinsmith.engine.model.precision import cumulative_sum

PARTIAL_SORT = 4096
"""Largest probabilities of a row that are sorted before all are."""
MASKED_ROWS = 16
"""Rows that top_k or top_p are applied to at once: sorting a whole row takes 40 bytes for each of its tokens."""
MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """How the tokens of one row are drawn."""

    temperature: float
    top_k: int
    top_p: float
    top_logprobs: int = 0
    """Number of likeliest tokens to return with each drawn token."""

    @property
    def restricted(self) -> bool:
        """Whether top_k or top_p may exclude tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens int64 [B] and their logprobs float32 [B]; for each draw the likeliest tokens, if its rule wants them."""

    tokens: Tensor
    logprobs: Tensor
    top_logprobs: tuple[TopK | None, ...]


def uniform_stream(seed: int, sample: int) -> np.random.Generator:
    """The uniform numbers of one sample of a request: a function of the seed, different for each sample."""
    return np.random.Generator(np.random.Philox(key=np.array([seed & (2**64 - 1), sample], dtype=np.uint64)))


def sample_tokens(
    logits: Tensor, rules: Sequence[SamplingRule], uniforms: Sequence[float], rows: Sequence[int] | None = None
) -> SampledTokens:
    """Draw one token for each number in [0, 1) of `uniforms`.

    `logits` float32 [R, V] are overwritten; there is a rule for each row. `rows` says from which row each token is
    drawn; without it, one is drawn from each row.

    All work is done in the memory of the logits: on a CPU a new tensor of this size costs more than its arithmetic.
    """
    rows = range(len(rules)) if rows is None else rows
    if any(rule.temperature not in (0, 1) for rule in rules):
        logits.div_(torch.tensor([divisor(rule.temperature) for rule in rules], device=logits.device)[:, None])
    greedy = [row for row, rule in enumerate(rules) if rule.temperature == 0]
    best = logits[greedy].argmax(dim=1) if greedy else None
    with_top = [row for row, rule in enumerate(rules) if rule.top_logprobs]
    scores = log_softmax(logits[with_top]) if with_top else logits[:0]
    top = {
        row: top_logprobs(row_scores[None], rules[row].top_logprobs)
        for row, row_scores in zip(with_top, scores, strict=True)
    }
    probs = torch.softmax(logits, dim=1, out=logits)
    goals = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    row_index = torch.tensor(rows, device=logits.device)
    tokens, totals = invert_cdf(probs, goals, row_index)
    restricted = [row for row, rule in enumerate(rules) if rule.restricted]
    for some_rows in (restricted[first : first + MASKED_ROWS] for first in range(0, len(restricted), MASKED_ROWS)):
        draws, places = _draws_from(some_rows, rows)
        masked = mask_top_k_top_p(probs[some_rows], [rules[row] for row in some_rows])
        tokens[draws], _ = invert_cdf(masked, goals[draws], row_index.new_tensor(places))
    if best is not None:
        draws, places = _draws_from(greedy, rows)
        tokens[draws] = best[places]
    logprobs = logprobs_of(probs[row_index, tokens], totals)
    if with_top:  # the drawn token has the very number that the list of likeliest tokens gives it
        draws, places = _draws_from(with_top, rows)
        logprobs[draws] = scores[places, tokens[draws]]
    return SampledTokens(tokens, logprobs, tuple(top.get(row) for row in rows))


def top_logprobs(logprobs: Tensor, k: int) -> TopK:
    """The k largest of each row of [R, V], largest first."""
    values, ids = logprobs.topk(k, dim=1)
    return TopK(token_ids=ids.int().cpu().numpy(), logprobs=values.cpu().numpy())


def sample_independent(logits: Tensor, temperature: float, uniforms: np.ndarray) -> TopK:
    """Draw k independent tokens from each row of logits [R, V] with `uniforms` [R, k], without top_k and top_p."""
    logprobs = log_softmax(logits / divisor(temperature))
    if temperature == 0:
        tokens = logits.argmax(dim=1, keepdim=True).expand(-1, uniforms.shape[1])
    else:
        probs, goals = logprobs.exp(), torch.as_tensor(uniforms, device=logits.device)
        row_index = torch.arange(len(logits), device=logits.device)
        tokens = torch.stack([invert_cdf(probs, column, row_index)[0] for column in goals.T], dim=1)
    return TopK(token_ids=tokens.int().cpu().numpy(), logprobs=logprobs.gather(1, tokens).cpu().numpy())


def mask_top_k_top_p(probs: Tensor, rules: Sequence[SamplingRule]) -> Tensor:
    """Probabilities float32 [R, V], with 0 outside each row's top_k, and within it outside the smallest set of tokens
    that holds top_p of its mass."""
    threshold, count = _thresholds(probs, rules, min(PARTIAL_SORT, probs.shape[1]))
    allowed = probs >= threshold[:, None]
    excess = allowed.sum(dim=1) - count
    for row in excess.nonzero()[:, 0].tolist():
        ties = (probs[row] == threshold[row]).nonzero()[:, 0]
        allowed[row, ties[-int(excess[row]) :]] = False
    return probs * allowed


def _thresholds(probs: Tensor, rules: Sequence[SamplingRule], size: int) -> tuple[Tensor, Tensor]:
    """The smallest probability that each row keeps, float32 [R], and the number of tokens kept, int64 [R]."""
    vocabulary, device = probs.shape[1], probs.device
    limits = [min(rule.top_k, vocabulary) if rule.top_k > 0 else vocabulary for rule in rules]
    top_k = torch.tensor(limits, device=device)[:, None]
    top_p = torch.tensor([rule.top_p for rule in rules], dtype=torch.float64, device=device)[:, None]
    values = _largest(probs, size)
    in_top_k = values.double() * (torch.arange(size, device=device) < top_k)
    mass = cumulative_sum(in_top_k)
    total = torch.where(top_k <= size, mass[:, -1:], probs.sum(dim=1, keepdim=True, dtype=torch.float64))
    count = ((mass - in_top_k) < top_p * total).sum(dim=1).clamp(min=1).minimum(top_k[:, 0])
    threshold = values.gather(1, count[:, None] - 1)[:, 0]
    undecided = (count == size) | ((top_k > size) & (top_k < vocabulary))[:, 0]
    if size < vocabulary and bool(undecided.any()):
        rows = undecided.nonzero()[:, 0]
        threshold[rows], count[rows] = _thresholds(probs[rows], [rules[row] for row in rows.tolist()], vocabulary)
    return threshold, count


def _largest(probs: Tensor, size: int) -> Tensor:
    """The `size` largest of each row in descending order. NumPy's vector code is ten times as fast as PyTorch's."""
    values = probs.numpy()
    if size < values.shape[1]:
        values = np.partition(values, -size, axis=1)[:, -size:]
    return torch.from_numpy(np.sort(values, axis=1)[:, ::-1].copy())


def divisor(temperature: float) -> float:
    """Divisor of the logits: 1 at temperature 0. Below MIN_TEMPERATURE the quotients would overflow, and only the
    likeliest token is drawn anyway."""
    return max(temperature, MIN_TEMPERATURE) if temperature else 1.0


def _draws_from(some_rows: Sequence[int], rows: Sequence[int]) -> tuple[list[int], list[int]]:
    """Indices of the draws that are from `some_rows`, and for each the index of its row among them."""
    places = {row: place for place, row in enumerate(some_rows)}
    draws = [draw for draw, row in enumerate(rows) if row in places]
    return draws, [places[rows[draw]] for draw in draws]


def invert_cdf(probs: Tensor, goals: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The token at which the cumulative sum of row `rows[b]` of `probs` [R, V] passes `goals[b]` of its total; and the
    totals, float64 [B].

    Blocks are summed first, so that rounding errors are those of a few hundred numbers and only one block is summed
    token by token.
    """
    in_block = block_sums(probs)
    sums = cumulative_sum(in_block)[rows]
    target = (goals * sums[:, -1])[:, None]
    block = _next_positive(in_block[rows], torch.searchsorted(sums, target, right=True))
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    last = probs.shape[1] - 1
    ids = block * SUM_BLOCK + torch.arange(SUM_BLOCK, device=probs.device)
    inside = torch.where(ids <= last, probs[rows[:, None], ids.clamp(max=last)], 0.0).double()
    place = _next_positive(inside, torch.searchsorted(cumulative_sum(inside), target - before, right=True))
    return (block * SUM_BLOCK + place)[:, 0].clamp(max=last), sums[:, -1]


def _next_positive(terms: Tensor, place: Tensor) -> Tensor:
    """Index [B, 1] of the first positive term of [B, N] from `place` [B, 1] on, or of the last one before it.

    Rounding may put the target at a term of 0 or after the end. A row of NaN has no positive term, and any will do.
    """
    positive = terms > 0
    from_place = positive & (torch.arange(terms.shape[1], device=terms.device) >= place)
    last = terms.shape[1] - 1 - positive.flip(1).int().argmax(dim=1, keepdim=True)
    return torch.where(from_place.any(dim=1, keepdim=True), from_place.int().argmax(dim=1, keepdim=True), last)
