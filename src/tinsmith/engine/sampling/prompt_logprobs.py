"""Results about the prompt: logprobs of its tokens, of the likeliest and of given tokens, and tokens drawn at each
position.

The distribution over prompt position i + 1 comes from the hidden state at position i; it is untempered except for the
drawn tokens. Position 0 has no context: its values are NaN, its cells empty; so are those of images. Logits are
computed a block of rows at a time and dropped; results go to the host after the last block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import EMPTY_LOGPROB, SampleRequest, TopK
from tinsmith.engine.images.rows import image_mask
from tinsmith.engine.lora.adapter import AdapterWeights
from tinsmith.engine.lora.head.softmax import log_softmax
from tinsmith.engine.lora.lm_head import LMHead
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
    start = first_hidden(request)
    first_scored = max(
        start + 1, 1 if request.prompt_logprobs_last_n is None else length - request.prompt_logprobs_last_n
    )
    prompt_ids = torch.as_tensor(request.prompt.astype(np.int64), device=hidden.device)
    given_ids = None if target_ids is None else torch.as_tensor(target_ids, device=hidden.device)
    blocks: list[dict[str, Tensor]] = []
    for first in range(start, length - 1, head.block_rows):
        rows = slice(first, min(first + head.block_rows, length - 1))
        logits = head.logits(hidden[rows], weights)
        if draws:
            drawn = token_sampling.sample_independent(logits, request.temperature, uniforms[rows])
            alternatives.token_ids[rows], alternatives.logprobs[rows] = drawn.token_ids, drawn.logprobs
        scores = log_softmax(logits)
        skipped = min(max(first_scored - 1 - first, 0), len(scores))
        of_next = _of_next_tokens(scores[skipped:], prompt_ids[first + 1 + skipped : rows.stop + 1], k)
        blocks.append(of_next if given_ids is None else {**of_next, "given": _of_given_tokens(scores, given_ids[rows])})
    if blocks:
        on_host = {name: torch.cat([block[name] for block in blocks]).cpu().numpy() for name in blocks[0]}
        logprobs[first_scored:] = on_host["prompt"]
        if k:
            best.logprobs[first_scored:], best.token_ids[first_scored:] = on_host["best"], on_host["best_ids"]
        if targets is not None:
            targets[: length - 1] = on_host["given"]
    _empty(image_mask(length, request.images), logprobs, best, targets, alternatives)
    return PromptResults(
        logprobs=logprobs if request.prompt_logprobs else None,
        topk=best if k else None,
        targets=targets,
        alternatives=alternatives if draws else None,
    )


def _of_next_tokens(scores: Tensor, ids: Tensor, k: int) -> dict[str, Tensor]:
    """Logprobs of the tokens that follow, `ids` [R], and of the k likeliest."""
    logprobs = {"prompt": scores.gather(1, ids[:, None])[:, 0]}
    if not k:
        return logprobs
    values, best = scores.topk(k, dim=1)
    return {**logprobs, "best": values, "best_ids": best}


def _of_given_tokens(scores: Tensor, ids: Tensor) -> Tensor:
    """Logprobs of given tokens, `ids` [R, K]; NaN where there is none."""
    return scores.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, float("nan"))


def _empty(
    positions: np.ndarray, logprobs: np.ndarray, best: TopK, targets: np.ndarray | None, alternatives: TopK
) -> None:
    """Remove the results at some positions, bool [N]."""
    logprobs[positions] = np.nan
    best.token_ids[positions], best.logprobs[positions] = 0, EMPTY_LOGPROB
    alternatives.token_ids[positions[1:]], alternatives.logprobs[positions[1:]] = 0, EMPTY_LOGPROB
    if targets is not None:
        targets[positions[1:]] = np.nan
