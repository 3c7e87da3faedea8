"""Token sampling on a GPU: the draws of `token_sampling`, in which the host reads nothing but the results, at once.

The rules of the rows are numbers on the device, so that one sequence of operators serves all rules. Rows are sorted
whole where top_k or top_p may exclude tokens: a partial sort would have to be looked at before it is known to suffice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import TopK
from tinsmith.engine.lora.head.softmax import log_softmax, logprobs_of
from tinsmith.engine.model.precision import cumulative_sum
from tinsmith.engine.sampling.token_sampling import PARTIAL_SORT, SampledTokens, SamplingRule, divisor, invert_cdf

SORT_BYTES = 512 << 20
"""Memory of the rows that are sorted at once."""
SORT_BYTES_PER_TOKEN = 40
RULE_COLUMNS = 6


@dataclass(frozen=True, slots=True)
class DrawKind:
    """What the draws of a batch need, whatever its rows: the operators follow from it."""

    restricted: bool = False
    """Whether top_k or top_p may exclude tokens of some row."""
    top_logprobs: int = 0
    """The most likeliest tokens that a row returns."""

    @classmethod
    def of(cls, rules: Sequence[SamplingRule]) -> DrawKind:
        """The kind that serves all of these rules."""
        return cls(any(rule.restricted for rule in rules), max((rule.top_logprobs for rule in rules), default=0))


def rule_columns(rules: Sequence[SamplingRule]) -> np.ndarray:
    """The rules as numbers, float64 [RULE_COLUMNS, R]."""
    rows = [
        (divisor(rule.temperature), rule.temperature == 0, rule.top_k, rule.top_p, rule.restricted, rule.top_logprobs)
        for rule in rules
    ]
    return np.array(rows, np.float64).reshape(-1, RULE_COLUMNS).T


def draw_tokens(logits: Tensor, columns: Tensor, goals: Tensor, rows: Tensor, kind: DrawKind) -> Tensor:
    """Draw a token from row `rows[b]` of `logits` float32 [R, V], which are overwritten, for each of `goals` [B].

    Returns float64 [B, 2 + 2 K]: the token, its logprob, and ids and logprobs of the K = `kind.top_logprobs` likeliest.
    """
    divisors, greedy, top_k, top_p, restricted, with_top = columns.unbind()
    logits.div_(divisors.float()[:, None])
    best = logits.argmax(dim=1)
    scores = log_softmax(logits.clone()) if kind.top_logprobs else None
    probs = torch.softmax(logits, dim=1, out=logits)
    tokens, totals = invert_cdf(probs, goals, rows)
    if kind.restricted:
        chosen, _ = invert_cdf(_masked(probs, top_k, top_p), goals, rows)
        tokens = torch.where(restricted[rows] > 0, chosen, tokens)
    tokens = torch.where(greedy[rows] > 0, best[rows], tokens)
    logprobs = logprobs_of(probs[rows, tokens], totals)
    if scores is None:
        return torch.stack([tokens.double(), logprobs.double()], dim=1)
    # The drawn token has the very number that the list of likeliest tokens gives it.
    logprobs = torch.where(with_top[rows] > 0, scores[rows, tokens], logprobs)
    values, ids = scores.topk(kind.top_logprobs, dim=1)
    drawn = torch.stack([tokens.double(), logprobs.double()], dim=1)
    return torch.cat([drawn, ids.double()[rows], values.double()[rows]], dim=1)


def sample_on_device(
    logits: Tensor, rules: Sequence[SamplingRule], uniforms: Sequence[float], rows: Sequence[int]
) -> SampledTokens:
    """As `token_sampling.sample_tokens`, with one copy to the device and one back; the results are on the host."""
    kind, count = DrawKind.of(rules), len(uniforms)
    numbers = np.concatenate([rule_columns(rules).ravel(), uniforms, rows])
    uploaded = torch.from_numpy(numbers).to(logits.device)
    columns = uploaded[: -2 * count].view(RULE_COLUMNS, -1)
    goals, row_index = uploaded[-2 * count : -count], uploaded[-count:].long()
    drawn = draw_tokens(logits, columns, goals, row_index, kind).cpu().numpy()
    return sampled_tokens(drawn, [rules[row] for row in rows])


def sampled_tokens(drawn: np.ndarray, rules: Sequence[SamplingRule]) -> SampledTokens:
    """Results of `draw_tokens` on the host, of the draws of these rules."""
    ids, logprobs = np.split(drawn[:, 2:], 2, axis=1)
    ids, logprobs = ids.astype(np.int32), logprobs.astype(np.float32)
    top = (
        TopK(token_ids=ids[[draw], : rule.top_logprobs], logprobs=logprobs[[draw], : rule.top_logprobs])
        if rule.top_logprobs
        else None
        for draw, rule in enumerate(rules)
    )
    tokens = torch.from_numpy(drawn[:, 0].astype(np.int64))
    return SampledTokens(tokens, torch.from_numpy(drawn[:, 1].astype(np.float32)), tuple(top))


def _masked(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`token_sampling.mask_top_k_top_p`, some rows at a time; arbitrary in rows without top_k and top_p."""
    rows = max(1, SORT_BYTES // (SORT_BYTES_PER_TOKEN * probs.shape[1]))
    parts = zip(*(tensor.split(rows) for tensor in (probs, top_k, top_p)), strict=True)
    return torch.cat([_masked_rows(*part) for part in parts])


def _masked_rows(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    vocabulary = probs.shape[1]
    limit = torch.where(top_k > 0, top_k.clamp(max=vocabulary), vocabulary)[:, None]
    values = probs.sort(dim=1, descending=True).values
    in_top_k = values.double() * (torch.arange(vocabulary, device=probs.device) < limit)
    mass = cumulative_sum(in_top_k)
    count = _tokens_below(mass, in_top_k, top_p[:, None] * mass[:, -1:])
    if vocabulary > PARTIAL_SORT:  # where the partial sort suffices, the total is the row's own sum
        whole = probs.sum(dim=1, keepdim=True, dtype=torch.float64)
        early = _tokens_below(mass[:, :PARTIAL_SORT], in_top_k[:, :PARTIAL_SORT], top_p[:, None] * whole)
        count = torch.where((limit == vocabulary) & (early < PARTIAL_SORT), early, count)
    count = count.minimum(limit.long())
    threshold = values.gather(1, count - 1)
    above, ties = probs > threshold, probs == threshold
    # Among tokens of equal probability the lower id comes first.
    allowed = above | (ties & (cumulative_sum(ties.float()) <= count - above.sum(dim=1, keepdim=True)))
    return probs * allowed


def _tokens_below(mass: Tensor, terms: Tensor, target: Tensor) -> Tensor:
    """int64 [R, 1]: how many of the largest probabilities have less than `target` [R, 1] before them; at least 1."""
    return ((mass - terms) < target).sum(dim=1, keepdim=True).clamp(min=1)
