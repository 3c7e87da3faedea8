"""The JSON of asample -> SampleRequest. What this server does not do is refused by name, never dropped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinsmith.engine.base import SampleRequest
from tinsmith.errors import BadRequest, Unsupported
from tinsmith.service.wire.protobuf import SparseLayout, densify, shaped
from tinsmith.service.wire.schemas import Prompt, SampleBody, SamplingParams, Tensor, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class AsampleRequest:
    """An asample body: what to sample, for which sampling session, and the layout of the answer's targets."""

    sampler_id: str
    seq: int
    request: SampleRequest
    layout: SparseLayout | None = None


def decode_sample(body: bytes) -> AsampleRequest:
    """An asample body; the request's id is still empty."""
    asked = parse(SampleBody, body)
    if asked.sampling_session_id is None or asked.seq_id is None:
        raise Unsupported("asample without sampling_session_id and seq_id is not served.", "Create a sampling session.")
    if not 0 <= asked.seq_id < 2**63:
        raise BadRequest(f"seq_id is {asked.seq_id}.", "Count a sampling session's requests from 0.")
    if asked.record_stability_info:
        raise Unsupported(
            "record_stability_info is not served here: stable_reinforce's objective is not published.",
            "Train with loss_fn=importance_sampling (or ppo, cispo).",
        )
    targets, layout = _targets(asked.target_prompt_logprobs)
    request = SampleRequest(
        request_id="",
        prompt=_prompt(asked.prompt),
        num_samples=asked.num_samples,
        prompt_logprobs=bool(asked.prompt_logprobs),
        prompt_logprobs_last_n=asked.prompt_logprobs_last_n,
        topk_prompt_logprobs=asked.topk_prompt_logprobs,
        topk_sample_logprobs=asked.topk_sample_logprobs,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=asked.prompt_alt_tokens_k,
        **_params(asked.sampling_params),
    )
    return AsampleRequest(sampler_id=asked.sampling_session_id, seq=asked.seq_id, request=request, layout=layout)


def _params(params: SamplingParams) -> dict[str, Any]:
    """A list of token ids, even an empty one, takes the place of end-of-sequence; strings stop beside it."""
    tokens: tuple[int, ...] | None = None
    strings: tuple[str, ...] = ()
    if isinstance(params.stop, str):
        strings = (params.stop,)
    elif params.stop is not None:
        strings = tuple(stop for stop in params.stop if isinstance(stop, str))
        tokens = None if strings else tuple(stop for stop in params.stop if isinstance(stop, int))
    if "" in strings:
        raise BadRequest("A stop string is empty.", "Give text, or stop=[] to stop at nothing.")
    return {
        "max_tokens": params.max_tokens,
        "seed": params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "stop_tokens": tokens,
        "stop_strings": strings,
    }


def _prompt(prompt: Prompt) -> np.ndarray:
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text":
            raise Unsupported(f"The prompt holds a chunk of type {chunk.type}.", "This server takes text only.")
    return _ids("prompt", [token for chunk in prompt.chunks for token in chunk.tokens]).astype(np.int32)


def _ids(where: str, values: Iterable[int]) -> np.ndarray:
    try:
        return np.asarray(values, dtype=np.int32).astype(np.int64)
    except OverflowError as error:
        raise BadRequest(f"{where} holds a number that is no token id.", "Use the model's own tokenizer.") from error


def _targets(tensor: Tensor | None) -> tuple[np.ndarray | None, SparseLayout | None]:
    where = "target_prompt_logprobs"
    if tensor is None:
        return None, None
    if tensor.dtype != "int64":
        raise BadRequest(f"{where} is {tensor.dtype}.", "Send int64 token ids.")
    values, shape = _ids(where, tensor.data), tuple(tensor.shape)
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        return shaped(where, values, shape), None
    layout = SparseLayout(crow=_ids(where, tensor.sparse_crow_indices), col=_ids(where, tensor.sparse_col_indices))
    return densify(where, shape, values, layout.crow, layout.col, -1), layout
