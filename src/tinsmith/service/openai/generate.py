"""/inference/v1/generate as vLLM has it: tokens in, tokens and logprobs out, for clients that render by themselves.

So verifiers and prime-rl train: a token that was sampled is never spelled out and read again.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from tinsmith.engine.base import SampledSequence
from tinsmith.service.dependencies import RawBody, ServiceDep
from tinsmith.service.openai.requests import named, new_id, request_of
from tinsmith.service.openai.responses import finite, rows
from tinsmith.service.openai.routes import Owner
from tinsmith.service.openai.sampling import Calls, whole
from tinsmith.service.openai.schemas import GenerateBody, GenerateParams, parse_exact

router = APIRouter()


@router.post("/generate")
async def generate(http: Request, owner: Owner, service: ServiceDep, body: RawBody) -> dict[str, Any]:
    """`sampling_params.n` continuations of `token_ids`. `weights` tells which weights answered."""
    asked = parse_exact(GenerateBody, body)
    params = parse_exact(GenerateParams, asked.sampling_params, "sampling_params.")
    service.sampling.check_capacity()
    found = named(service, asked.model, owner)
    card = await found.worker.host.card()
    asks = {"topk_sample_logprobs": params.logprobs or 0}
    request = request_of(params, card, found, asked.token_ids, params.max_tokens, **asks)
    calls = Calls(owner=owner, base_model=found.base_model, requests=[request])
    (sampled,) = await whole(http, service.sampling, calls)
    said = sum(len(sequence.tokens) for sequence in sampled.sequences)
    return {
        "request_id": new_id("generate"),
        "choices": [_choice(at, one, params.logprobs) for at, one in enumerate(sampled.sequences)],
        "prompt_token_ids": asked.token_ids,
        "weights": found.weights,
        "usage": {
            "prompt_tokens": len(request.prompt),
            "completion_tokens": said,
            "total_tokens": len(request.prompt) + said,
            "prompt_tokens_details": {"cached_tokens": sampled.prompt_cache_hit_tokens},
        },
    }


def _choice(index: int, sequence: SampledSequence, logprobs: int | None) -> dict[str, Any]:
    tokens = sequence.tokens.tolist()
    return {
        "index": index,
        "token_ids": tokens,
        "finish_reason": sequence.stop_reason,
        "logprobs": _logprobs(sequence) if logprobs is not None else None,
    }


def _logprobs(sequence: SampledSequence) -> dict[str, Any]:
    tokens = sequence.tokens.tolist()
    tops = rows(sequence.topk) or [()] * len(tokens)
    entries = zip(tokens, finite(sequence.logprobs), tops, strict=True)
    return {
        "content": [{**_entry(token, p), "top_logprobs": [_entry(*pair) for pair in top]} for token, p, top in entries]
    }


def _entry(token: int, logprob: float | None) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": logprob}
