"""What a request asks about its prompt: logprobs of its own tokens, of the likeliest ones, of given ones, and draws.

The distribution over prompt position i + 1 comes from the hidden state at position i, untempered but for the draws.
Position 0 has no context: NaN, or empty cells. Rows of logits are made a block at a time and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import SampleRequest, TopK
from tinsmith.engine.lora.adapter import Weights
from tinsmith.engine.lora.lm_head import ROWS, Head, log_softmax
from tinsmith.engine.sampling import token_sampling

EMPTY_LOGPROB = -99999.0
DRAWS = 2**63
"""The stream of a request's draws beside the prompt: no sample's, so that asking for them changes no sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAnswers:
    """The prompt fields of `engine.base.Sampled`."""

    logprobs: np.ndarray | None
    topk: TopK | None
    targets: np.ndarray | None
    alt: TopK | None


def asks(request: SampleRequest) -> bool:
    """Whether the prompt's logits are needed at all."""
    wanted = request.prompt_logprobs or request.target_prompt_logprobs is not None
    return wanted or request.topk_prompt_logprobs > 0 or request.prompt_alt_tokens_k > 0


def needed(request: SampleRequest) -> int:
    """The first prompt position whose hidden state is wanted; the last one's always is."""
    last = len(request.prompt) - 1
    if request.target_prompt_logprobs is not None or request.prompt_alt_tokens_k:
        return 0
    if not asks(request):
        return last
    return 0 if request.prompt_logprobs_last_n is None else max(0, last - request.prompt_logprobs_last_n)


@torch.no_grad()
def answer(request: SampleRequest, head: Head, hidden: Tensor, weights: Weights | None, seed: int) -> PromptAnswers:
    """`hidden` [N, D] are the prompt's last hidden states, unread before `needed`; `seed` is for what is drawn."""
    length, k = len(request.prompt), request.topk_prompt_logprobs
    logprobs = np.full(length, np.nan, np.float32)
    best = TopK(token_ids=np.zeros((length, k), np.int32), logprobs=np.full((length, k), EMPTY_LOGPROB, np.float32))
    wanted = request.target_prompt_logprobs
    targets = None if wanted is None else np.full(wanted.shape, np.nan, np.float32)
    drawn = request.prompt_alt_tokens_k
    alt = TopK(token_ids=np.zeros((length - 1, drawn), np.int32), logprobs=np.zeros((length - 1, drawn), np.float32))
    uniforms = token_sampling.stream(seed, DRAWS).random((length - 1, drawn))
    first_scored = 1 if request.prompt_logprobs_last_n is None else length - request.prompt_logprobs_last_n
    for first in range(needed(request), length - 1, ROWS):
        rows = slice(first, min(first + ROWS, length - 1))
        logits = head.logits(hidden[rows], weights)
        if drawn:
            found = token_sampling.draws(logits, request.temperature, uniforms[rows])
            alt.token_ids[rows], alt.logprobs[rows] = found.token_ids, found.logprobs
        scores = log_softmax(logits)
        scored = slice(max(rows.start + 1, first_scored), rows.stop + 1)
        mine = scores[scored.start - 1 - rows.start :]
        if request.prompt_logprobs and len(mine):
            ids = torch.as_tensor(request.prompt[scored].astype(np.int64), device=scores.device)
            logprobs[scored] = mine.gather(1, ids[:, None])[:, 0].cpu().numpy()
        if k and len(mine):
            values, ids = mine.topk(k, dim=1)
            best.token_ids[scored], best.logprobs[scored] = ids.cpu().numpy(), values.cpu().numpy()
        if targets is not None and wanted is not None:
            ids = torch.as_tensor(wanted[rows], device=scores.device)
            found = scores.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, float("nan"))
            targets[rows] = found.cpu().numpy()
    return PromptAnswers(
        logprobs=logprobs if request.prompt_logprobs else None,
        topk=best if k else None,
        targets=targets,
        alt=alt if drawn else None,
    )
