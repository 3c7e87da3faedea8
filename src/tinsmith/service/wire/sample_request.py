"""Decode asample bodies. Options that are not implemented are rejected by name."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinsmith.engine.base import InputImage, SampleRequest
from tinsmith.errors import BadRequest, Unsupported
from tinsmith.service.wire.model_input import image_chunk, join_chunks, unsupported_chunk
from tinsmith.service.wire.protobuf import SparseLayout, densify, reshape_checked
from tinsmith.service.wire.schemas import Chunk, Prompt, SampleBody, SamplingParams, Tensor, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class AsampleRequest:
    """A decoded asample body: the engine's request, its sampling session, and the layout of sparse targets."""

    sampler_id: str
    seq: int
    request: SampleRequest
    layout: SparseLayout | None = None


def decode_sample(body: bytes) -> AsampleRequest:
    """Decode an asample body; the request's id is left empty. Raises BadRequest or Unsupported."""
    parsed = parse(SampleBody, body)
    if parsed.sampling_session_id is None or parsed.seq_id is None:
        raise Unsupported(
            "asample without sampling_session_id and seq_id is not supported.", "Create a sampling session."
        )
    if not 0 <= parsed.seq_id < 2**63:
        raise BadRequest(f"seq_id is {parsed.seq_id}.", "Number a sampling session's requests from 0.")
    if parsed.record_stability_info:
        raise Unsupported(
            "record_stability_info is not supported: the objective of stable_reinforce is not published.",
            "Train with loss_fn=importance_sampling (or ppo, cispo).",
        )
    targets, layout = _targets(parsed.target_prompt_logprobs)
    prompt, images = _prompt(parsed.prompt)
    request = SampleRequest(
        request_id="",
        prompt=prompt,
        images=images,
        num_samples=parsed.num_samples,
        prompt_logprobs=bool(parsed.prompt_logprobs),
        prompt_logprobs_last_n=parsed.prompt_logprobs_last_n,
        topk_prompt_logprobs=parsed.topk_prompt_logprobs,
        topk_sample_logprobs=parsed.topk_sample_logprobs,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=parsed.prompt_alt_tokens_k,
        routed_experts=parsed.return_routed_experts,
        **_params(parsed.sampling_params),
    )
    return AsampleRequest(sampler_id=parsed.sampling_session_id, seq=parsed.seq_id, request=request, layout=layout)


def _params(params: SamplingParams) -> dict[str, Any]:
    """Sampling options. Stop token ids, even an empty list, replace the end-of-sequence tokens; stop strings do not."""
    tokens: tuple[int, ...] | None = None
    strings: tuple[str, ...] = ()
    if isinstance(params.stop, str):
        strings = (params.stop,)
    elif params.stop is not None:
        strings = tuple(stop for stop in params.stop if isinstance(stop, str))
        tokens = None if strings else tuple(stop for stop in params.stop if isinstance(stop, int))
    if "" in strings:
        raise BadRequest("A stop string is empty.", "Give text, or stop=[] for no stop.")
    return {
        "max_tokens": params.max_tokens,
        "seed": params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "stop_tokens": tokens,
        "stop_strings": strings,
    }


def _prompt(prompt: Prompt) -> tuple[np.ndarray, tuple[InputImage, ...]]:
    if any(chunk.type != "encoded_text" for chunk in prompt.chunks):
        return join_chunks("The prompt", [_chunk(chunk) for chunk in prompt.chunks])
    return _ids("prompt", [token for chunk in prompt.chunks for token in chunk.tokens]).astype(np.int32), ()


def _chunk(chunk: Chunk) -> np.ndarray | InputImage:
    """Tokens of a chunk, or its image, which has no place yet."""
    if chunk.type == "encoded_text":
        return _ids("prompt", chunk.tokens).astype(np.int32)
    if chunk.type != "image":
        raise unsupported_chunk("The prompt", chunk.type)
    try:
        data = base64.b64decode(chunk.data, validate=True)
    except ValueError as error:
        raise BadRequest(f"The prompt holds an image that is not base64: {error}.", "Encode its file.") from error
    size = chunk.override_dimensions
    if size is not None and len(size) < 2:
        raise BadRequest("override_dimensions of an image lack width or height.", "Give both.")
    pixels = (size["width"], size["height"]) if size is not None else None
    return image_chunk("The prompt", data, chunk.format, chunk.expected_tokens, pixels)


def _ids(where: str, values: Iterable[int]) -> np.ndarray:
    try:
        return np.asarray(values, dtype=np.int32).astype(np.int64)
    except OverflowError as error:
        raise BadRequest(f"{where} holds a number that is not a token id.", "Use the model's own tokenizer.") from error


def _targets(tensor: Tensor | None) -> tuple[np.ndarray | None, SparseLayout | None]:
    where = "target_prompt_logprobs"
    if tensor is None:
        return None, None
    if tensor.dtype != "int64":
        raise BadRequest(f"{where} is {tensor.dtype}.", "Send int64 token ids.")
    values, shape = _ids(where, tensor.data), tuple(tensor.shape)
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        return reshape_checked(where, values, shape), None
    layout = SparseLayout(crow=_ids(where, tensor.sparse_crow_indices), col=_ids(where, tensor.sparse_col_indices))
    return densify(where, shape, values, layout.crow, layout.col, -1), layout
