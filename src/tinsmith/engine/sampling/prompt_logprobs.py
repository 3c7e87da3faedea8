"""Results about the prompt: logprobs of its tokens, of the likeliest and of given tokens, and tokens drawn at each
position.

The distribution over prompt position i + 1 comes from the hidden state at position i; it is untempered except for the
drawn tokens. Position 0 has no context: its values are NaN, its cells empty; so are those of images. Logits are
computed a block of rows at a time and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import EMPTY_LOGPROB, SampleRequest, TopK
from tinsmith.engine.images.rows import image_mask
from tinsmith.engine.lora.adapter import AdapterWeights
from tinsmith.engine.lora.lm_head import BLOCK_ROWS, LMHead, log_softmax
from tinsmith.engine.sampling import token_sampling

PROMPT_STREAM = 2**63
"""Stream of the tokens drawn at prompt positions: no sample has it, so drawing them changes no sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResults:
    """The prompt fields of `engine.base.SampleResult`."""

    logprobs: np.ndarray | None
    topk: TopK | None
    targets: np.ndarray | None
    alternatives: TopK | None


def needs_logits(request: SampleRequest) -> bool:
    """Whether the request needs the logits of prompt positions other than the last."""
    tokens = request.prompt_logprobs or request.target_prompt_logprobs is not None
    return tokens or request.topk_prompt_logprobs > 0 or request.prompt_alt_tokens_k > 0


def first_hidden(request: SampleRequest) -> int:
    """The first prompt position whose hidden state is needed; that of the last position always is."""
    last = len(request.prompt) - 1
    if request.target_prompt_logprobs is not None or request.prompt_alt_tokens_k:
        return 0
    if not needs_logits(request):
        return last
    return 0 if request.prompt_logprobs_last_n is None else max(0, last - request.prompt_logprobs_last_n)


@torch.no_grad()
def compute(
    request: SampleRequest, head: LMHead, hidden: Tensor, weights: AdapterWeights | None, seed: int
) -> PromptResults:
    """Results of one request. `hidden` [N, D] are the prompt's last hidden states, arbitrary before `first_hidden`;
    `seed` is for the drawn tokens."""
    length, k = len(request.prompt), request.topk_prompt_logprobs
    logprobs = np.full(length, np.nan, np.float32)
    best = TopK.empty(length, k)
    target_ids = request.target_prompt_logprobs
    targets = None if target_ids is None else np.full(target_ids.shape, np.nan, np.float32)
    draws = request.prompt_alt_tokens_k
    alternatives = TopK.empty(length - 1, draws)
    uniforms = token_sampling.uniform_stream(seed, PROMPT_STREAM).random((length - 1, draws))
    first_scored = 1 if request.prompt_logprobs_last_n is None else length - request.prompt_logprobs_last_n
    for first in range(first_hidden(request), length - 1, BLOCK_ROWS):
        rows = slice(first, min(first + BLOCK_ROWS, length - 1))
        logits = head.logits(hidden[rows], weights)
        if draws:
            drawn = token_sampling.sample_independent(logits, request.temperature, uniforms[rows])
            alternatives.token_ids[rows], alternatives.logprobs[rows] = drawn.token_ids, drawn.logprobs
        scores = log_softmax(logits)
        scored = slice(max(rows.start + 1, first_scored), rows.stop + 1)
        scored_rows = scores[scored.start - 1 - rows.start :]
        if request.prompt_logprobs and len(scored_rows):
            ids = torch.as_tensor(request.prompt[scored].astype(np.int64), device=scores.device)
            logprobs[scored] = scored_rows.gather(1, ids[:, None])[:, 0].cpu().numpy()
        if k and len(scored_rows):
            values, ids = scored_rows.topk(k, dim=1)
            best.token_ids[scored], best.logprobs[scored] = ids.cpu().numpy(), values.cpu().numpy()
        if targets is not None and target_ids is not None:
            ids = torch.as_tensor(target_ids[rows], device=scores.device)
            target_scores = scores.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, float("nan"))
            targets[rows] = target_scores.cpu().numpy()
    _empty(image_mask(length, request.images), logprobs, best, targets, alternatives)
    return PromptResults(
        logprobs=logprobs if request.prompt_logprobs else None,
        topk=best if k else None,
        targets=targets,
        alternatives=alternatives if draws else None,
    )


def _empty(
    positions: np.ndarray, logprobs: np.ndarray, best: TopK, targets: np.ndarray | None, alternatives: TopK
) -> None:
    """Remove the results at some positions, bool [N]."""
    logprobs[positions] = np.nan
    best.token_ids[positions], best.logprobs[positions] = 0, EMPTY_LOGPROB
    alternatives.token_ids[positions[1:]], alternatives.logprobs[positions[1:]] = 0, EMPTY_LOGPROB
    if targets is not None:
        targets[positions[1:]] = np.nan
