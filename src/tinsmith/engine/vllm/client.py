"""Requests to a vLLM server: /v1/completions as records of `engine.base`, with token ids, and loading of adapters.

Nothing is left to vLLM's defaults: stops are given as token ids, and its own end of sequence is off. Logprobs are those
of softmax(logits / temperature), which its mode `processed_logprobs` gives as long as top_k and top_p are off.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np

from tinsmith.engine.base import ModelCard, OnDelta, SampledSequence, SampleRequest, SampleResult, SequenceDelta, TopK
from tinsmith.engine.vllm.server import VllmServer
from tinsmith.errors import EngineDied

CONNECT_TIMEOUT_S = 10.0


def has_prompt_questions(request: SampleRequest) -> bool:
    """Whether the request has any option about its prompt."""
    counts = request.topk_prompt_logprobs + request.prompt_alt_tokens_k
    return request.prompt_logprobs or request.target_prompt_logprobs is not None or counts > 0


def prompt_questions(request: SampleRequest) -> SampleRequest:
    """The part of a request that is about its prompt, with as little sampling as possible."""
    return replace(request, num_samples=1, max_tokens=1, topk_sample_logprobs=0)


def is_supported(request: SampleRequest, card: ModelCard) -> bool:
    """Whether vLLM's samples are what the request means.

    They are not with top_k or top_p, for which vLLM renormalises the logprobs; nor where the last token of the context
    is sampled, rotary embeddings may change as a row grows, or a row may outgrow the context of vLLM. A single token
    with questions about the prompt is refused too: the questions cost as much as the token. So are samples whose routed
    experts are recorded, which the trainer's own kernels compute, and prompts with images, which the tower sees that
    training uses.
    """
    restricted = request.temperature > 0 and (request.top_k > 0 or request.top_p < 1)
    limit = card.vllm_context or card.original_context
    max_tokens = request.max_tokens or (card.context_length if limit else 1)
    fits = len(request.prompt) + max_tokens <= (limit or card.context_length)
    alone = request.routed_experts or request.images or (request.max_tokens == 1 and has_prompt_questions(request))
    return fits and not restricted and not alone


def request_body(request: SampleRequest, card: ModelCard, name: str, *, stream: bool) -> dict[str, Any]:
    """The JSON body of a request to the model or adapter `name`."""
    stops = card.eos_token_ids if request.stop_tokens is None else request.stop_tokens
    context_left = card.context_length - len(request.prompt)
    greedy = request.temperature == 0
    body: dict[str, Any] = {
        "model": name,
        "prompt": request.prompt.tolist(),
        "n": 1 if greedy else request.num_samples,  # vLLM rejects n > 1 for greedy samples, which are all the same
        "max_tokens": context_left if request.max_tokens is None else request.max_tokens,
        "temperature": request.temperature,
        "stop_token_ids": list(stops),
        "ignore_eos": True,
        "stop": list(request.stop_strings),
        "include_stop_str_in_output": True,
        "logprobs": request.topk_sample_logprobs,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "stream": stream,
    }
    if request.seed is not None:
        body["seed"] = _hash_seed(request.seed) + request.first_sample
    if request.cache_scope:
        body["cache_salt"] = request.cache_scope
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


def _hash_seed(seed: int) -> int:
    """vLLM uses seed + i for sample i of a request: hashed, so that neighbouring seeds share no samples."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=6).digest())


@dataclass(slots=True)
class PartialSequence:
    """One sequence as its parts arrive."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopK] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] | None = None

    def result(self) -> SampledSequence:
        return SampledSequence(
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            stop_reason=self.stop_reason or "length",
            topk=TopK.concatenate(self.top_logprobs) if self.top_logprobs else None,
        )


class CompletionParser:
    """Builds the sequences of one request from one response, or from the chunks of a stream."""

    def __init__(self, request: SampleRequest) -> None:
        self._request = request
        self._copies = request.num_samples if request.temperature == 0 else 1
        self._sequences = [PartialSequence() for _ in range(request.num_samples // self._copies)]
        self._cached_tokens = 0

    def add(self, response: Mapping[str, Any]) -> list[SequenceDelta]:
        """Add a JSON object of vLLM's; returns what is new. Raises EngineDied if vLLM gave up on a sequence."""
        deltas = []
        for choice in response["choices"]:
            deltas += self._add_choice(choice)
        usage = response.get("usage") or {}
        self._cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or self._cached_tokens
        return deltas

    def result(self) -> SampleResult:
        """The complete result. Raises EngineDied if vLLM closed the connection before the end."""
        if any(sequence.stop_reason is None for sequence in self._sequences):
            raise EngineDied("vLLM closed the connection before the end of the response.", "Submit the request again.")
        return SampleResult(
            sequences=tuple(sequence.result() for sequence in self._sequences for _ in range(self._copies)),
            prompt_cache_hit_tokens=self._cached_tokens,
        )

    def _add_choice(self, choice: Mapping[str, Any]) -> list[SequenceDelta]:
        sequence = self._sequences[choice["index"]]
        reason = choice["finish_reason"]
        if reason not in (None, "stop", "length"):
            raise EngineDied(f"vLLM ended a sequence early ({reason}).", "Submit the request again.")
        sequence.stop_reason = reason
        tokens = choice["token_ids"] or []
        if not tokens:
            return []
        logprobs = choice["logprobs"]
        sequence.tokens += tokens
        sequence.logprobs += logprobs["token_logprobs"]
        top = _top_logprobs(logprobs["top_logprobs"], k) if (k := self._request.topk_sample_logprobs) else None
        if top is not None:
            sequence.top_logprobs.append(top)
        first = self._request.first_sample + choice["index"] * self._copies
        samples = range(first, first + self._copies)
        token_logprobs = tuple(logprobs["token_logprobs"])
        return [
            SequenceDelta(sample=sample, tokens=tuple(tokens), logprobs=token_logprobs, topk=top) for sample in samples
        ]


def _top_logprobs(steps: Sequence[Mapping[str, float]], k: int) -> TopK:
    """The k likeliest tokens of each step. vLLM adds the sampled token if it is not among them; it is cut off."""
    top = TopK.empty(len(steps), k)
    for row, step in enumerate(steps):
        best = sorted(step.items(), key=lambda cell: -cell[1])[:k]
        top.token_ids[row, : len(best)] = [int(name.removeprefix("token_id:")) for name, _ in best]
        top.logprobs[row, : len(best)] = [logprob for _, logprob in best]
    return top


class VllmClient:
    """Connections to a server. Calls raise EngineDied if vLLM ends, which is killed if it does not answer."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._http = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)

    async def close(self) -> None:
        """Close the connections. Later calls raise EngineDied: a call may wait for its turn on a GPU until then."""
        await self._http.aclose()

    async def complete(
        self, request: SampleRequest, card: ModelCard, name: str, on_delta: OnDelta | None
    ) -> SampleResult:
        """Sample from the model or adapter `name`. Raises EngineError if vLLM answers with an error."""
        body = request_body(request, card, name, stream=on_delta is not None)
        url, parser = f"{self._server.url}/v1/completions", CompletionParser(request)
        await self._check_open()
        try:
            with self._server.sampling():
                if on_delta is None:
                    response = await self._http.post(url, json=body)
                    _check(response.status_code, response.text)
                    parser.add(response.json())
                else:
                    await self._stream(url, body, parser, on_delta)
        except httpx.TransportError as error:
            raise await self._server.connection_lost() from error
        except _Failed as error:
            raise await self._server.request_failed(f"vLLM failed: {error}"[:500]) from error
        return parser.result()

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter folder under a name. Raises EngineError if vLLM answers with an error."""
        response = await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        if response.status_code != 200:
            raise await self._server.request_failed(f"vLLM does not load the adapter: {response.text[:500]}")

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter."""
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def _post(self, path: str, body: dict[str, str]) -> httpx.Response:
        await self._check_open()
        try:
            with self._server.answered_in_time(f"{path} ({body['lora_name']})"):
                return await self._http.post(self._server.url + path, json=body)
        except httpx.TransportError as error:
            raise await self._server.connection_lost() from error

    async def _check_open(self) -> None:
        if self._http.is_closed:
            raise await self._server.connection_lost()

    async def _stream(self, url: str, body: dict[str, Any], parser: CompletionParser, on_delta: OnDelta) -> None:
        async with self._http.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                _check(response.status_code, (await response.aread()).decode(errors="replace"))
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise _Failed(chunk["error"])
                for delta in parser.add(chunk):
                    on_delta(delta)


class _Failed(Exception):
    """vLLM answered with an error."""


def _check(status: int, text: str) -> None:
    if status != 200:
        raise _Failed(f"status {status}: {text}")
