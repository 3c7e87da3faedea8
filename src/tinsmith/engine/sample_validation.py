"""Validation of requests for samples, as `validation` has it for those of training."""

from __future__ import annotations

import numpy as np

from tinsmith.engine.base import ModelCard, SampleRequest
from tinsmith.engine.validation import check_ids, check_input, context_of, unrouted
from tinsmith.errors import BadRequest, Unsupported

MAX_SAMPLES = 1024
MAX_CELLS = 2**22
"""Log-probabilities that one field may request for a prompt: 8,192 positions with 512 each."""
MAX_SAMPLED_CELLS = 2**24
"""The same for topk_sample_logprobs."""
MAX_STOPS = 256
MAX_STOP_CHARACTERS = 2**16


def check_sample(request: SampleRequest, card: ModelCard) -> None:
    """Raises BadRequest unless the prompt fits and every parameter is valid."""
    unknown = sum(not image.length for image in request.images)  # of which only the engine knows how many tokens
    length, context = len(request.prompt) + unknown, card.context_length
    if length == 0:
        raise BadRequest("The prompt is empty.", "Give at least one token.")
    if length + (request.max_tokens or 1) - 1 > context:
        raise BadRequest(
            f"A prompt of {length} tokens with max_tokens {request.max_tokens} does not fit: the context length of "
            f"{card.source} is {context_of(card)}.",
            "Shorten the prompt or lower max_tokens.",
        )
    check_input("The prompt", request.prompt, request.images, card)
    if request.routed_experts and card.router is None:
        raise Unsupported(
            f"{card.source} records no routed experts: {unrouted(card)}.",
            "Sample without them.",
            field="return_routed_experts",
        )
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise BadRequest(
            f"num_samples is {request.num_samples}.", f"Give a number from 1 to {MAX_SAMPLES}.", field="num_samples"
        )
    if request.max_tokens is not None and request.max_tokens < 1:
        raise BadRequest(
            f"max_tokens is {request.max_tokens}.", "Give at least 1, or leave it out.", field="max_tokens"
        )
    if not (np.isfinite(request.temperature) and request.temperature >= 0):
        raise BadRequest(
            f"temperature is {request.temperature}.", "Give 0 (greedy) or a positive number.", field="temperature"
        )
    if request.top_k != -1 and request.top_k < 1:
        raise BadRequest(f"top_k is {request.top_k}.", "Give -1 (off) or at least 1.", field="top_k")
    if not 0 <= request.top_p <= 1:
        raise BadRequest(f"top_p is {request.top_p}.", "Give a number from 0 (greedy) to 1.", field="top_p")
    _check_stops(request, card)
    _check_prompt_fields(request, card)


def _check_prompt_fields(request: SampleRequest, card: ModelCard) -> None:
    length = len(request.prompt)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if not 0 <= getattr(request, name) <= card.vocab_size:
            raise BadRequest(
                f"{name} is {getattr(request, name)}.", f"Give a number from 0 to {card.vocab_size}.", field=name
            )
    _check_cells(request, card)
    if not all(image.length for image in request.images):
        return  # the engine checks what depends on the length
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not (request.prompt_logprobs and 1 <= last_n <= length - 1):
        raise BadRequest(
            f"prompt_logprobs_last_n is {last_n} for a prompt of {length} tokens.",
            "Set prompt_logprobs and give a number from 1 to the prompt's length minus 1.",
        )
    targets = request.target_prompt_logprobs
    if targets is not None:
        if targets.ndim != 2 or len(targets) != length - 1:
            raise BadRequest(
                f"target_prompt_logprobs has shape {targets.shape} for a prompt of {length} tokens.",
                f"Give ({length - 1}, K): row i is for prompt position i + 1.",
            )
        check_ids("target_prompt_logprobs", targets[targets != -1], card)


def _check_stops(request: SampleRequest, card: ModelCard) -> None:
    characters = sum(map(len, request.stop_strings))
    if len(request.stop_strings) > MAX_STOPS or characters > MAX_STOP_CHARACTERS:
        raise BadRequest(
            f"There are {len(request.stop_strings)} stop strings of {characters} characters together.",
            f"Give at most {MAX_STOPS}, of at most {MAX_STOP_CHARACTERS} characters together.",
            field="stop",
        )
    for token in request.stop_tokens or ():
        if not 0 <= token < card.vocab_size:
            raise BadRequest(
                f"Stop token {token} is not in the vocabulary of {card.vocab_size} tokens.",
                "Give valid token ids.",
                field="stop_token_ids",
            )


def _check_cells(request: SampleRequest, card: ModelCard) -> None:
    """Check that the requested log-probabilities fit into memory."""
    length = len(request.prompt)
    for name in ("topk_prompt_logprobs", "prompt_alt_tokens_k"):
        if length * (k := getattr(request, name)) > MAX_CELLS:
            raise BadRequest(
                f"{name} is {k} for a prompt of {length} tokens.", f"Their product must not exceed {MAX_CELLS}."
            )
    most = request.num_samples * (request.max_tokens or card.context_length)
    if most * request.topk_sample_logprobs > MAX_SAMPLED_CELLS:
        raise BadRequest(
            f"topk_sample_logprobs is {request.topk_sample_logprobs} for up to {most} sampled tokens.",
            f"Their product must not exceed {MAX_SAMPLED_CELLS}: lower max_tokens, num_samples or the width.",
        )
