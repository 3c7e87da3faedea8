"""What vLLM's /v1/completions is asked and what it answers, as records of `engine.base`: token ids in, token ids out.

Nothing is left to a default of vLLM's: stops are given as ids, and its own end-of-sequence is off. Logprobs are those
of softmax(logits / temperature), which its mode `processed_logprobs` gives as long as top_k and top_p are off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from tinsmith.engine.base import ModelCard, Piece, Sampled, SampledSequence, SampleRequest, TopK
from tinsmith.errors import EngineDied

EMPTY_LOGPROB = -99999.0


def asks_prompt(request: SampleRequest) -> bool:
    """Whether something is asked about the prompt itself."""
    counts = request.topk_prompt_logprobs + request.prompt_alt_tokens_k
    return request.prompt_logprobs or request.target_prompt_logprobs is not None or counts > 0


def about_prompt(request: SampleRequest) -> SampleRequest:
    """The part of a request that asks about its prompt, with as little sampled as there may be."""
    return replace(request, num_samples=1, max_tokens=1, topk_sample_logprobs=0)


def continues(request: SampleRequest, card: ModelCard) -> bool:
    """Whether vLLM draws these samples as we mean them.

    Not with top_k or top_p, for which it gives the logprobs of what is left renormalised; not where the last token of
    the context is drawn; and not where one token comes with questions about the prompt, which cost as much as it.
    """
    narrowed = request.temperature > 0 and (request.top_k > 0 or request.top_p < 1)
    fits = len(request.prompt) + (request.max_tokens or 1) <= card.context_length
    return fits and not narrowed and not (request.max_tokens == 1 and asks_prompt(request))


def body_of(request: SampleRequest, card: ModelCard, name: str, *, stream: bool) -> dict[str, Any]:
    """The JSON of a request to the model or adapter `name`."""
    stops = card.eos_token_ids if request.stop_tokens is None else request.stop_tokens
    left = card.context_length - len(request.prompt)
    greedy = request.temperature == 0
    body: dict[str, Any] = {
        "model": name,
        "prompt": request.prompt.tolist(),
        "n": 1 if greedy else request.num_samples,  # it refuses several greedy ones, which are all the same
        "max_tokens": left if request.max_tokens is None else request.max_tokens,
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
        body["seed"] = _spread(request.seed)
    if request.space:
        body["cache_salt"] = request.space
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


def _spread(seed: int) -> int:
    """vLLM gives sample i of a request the seed plus i: neighbouring seeds must not share samples."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=6).digest())


@dataclass(slots=True)
class Growing:
    """One sequence as its parts come."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopK] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] | None = None


class Answers:
    """The sequences of one request, from one answer or from the parts of a stream."""

    def __init__(self, request: SampleRequest) -> None:
        self._request = request
        self._copies = request.num_samples if request.temperature == 0 else 1
        self._growing = [Growing() for _ in range(request.num_samples // self._copies)]
        self._cached = 0

    def take(self, answer: Mapping[str, Any]) -> list[Piece]:
        """One JSON object of vLLM's; returns what is new. Raises EngineDied if it gave up on a sequence."""
        pieces = []
        for choice in answer["choices"]:
            pieces += self._take_choice(choice)
        usage = answer.get("usage") or {}
        self._cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or self._cached
        return pieces

    def _take_choice(self, choice: Mapping[str, Any]) -> list[Piece]:
        growing = self._growing[choice["index"]]
        reason = choice["finish_reason"]
        if reason not in (None, "stop", "length"):
            raise EngineDied(f"vLLM ended a sequence early ({reason}).", "Submit it again.")
        growing.stop_reason = reason
        tokens = choice["token_ids"] or []
        if not tokens:
            return []
        found = choice["logprobs"]
        growing.tokens += tokens
        growing.logprobs += found["token_logprobs"]
        top = _top(found["top_logprobs"], k) if (k := self._request.topk_sample_logprobs) else None
        if top is not None:
            growing.tops.append(top)
        numbers = range(choice["index"] * self._copies, (choice["index"] + 1) * self._copies)
        told = tuple(found["token_logprobs"])
        return [Piece(sample=one, tokens=tuple(tokens), logprobs=told, topk=top) for one in numbers]

    def sampled(self) -> Sampled:
        """All of it. Raises EngineDied if vLLM hung up before the end."""
        if any(one.stop_reason is None for one in self._growing):
            raise EngineDied("vLLM hung up before it had answered.", "Submit it again.")
        ended = [one for one in self._growing for _ in range(self._copies)]
        return Sampled(
            sequences=tuple(
                SampledSequence(
                    tokens=np.array(one.tokens, np.int32),
                    logprobs=np.array(one.logprobs, np.float32),
                    stop_reason=one.stop_reason or "length",
                    topk=_joined(one.tops) if one.tops else None,
                )
                for one in ended
            ),
            prompt_cache_hit_tokens=self._cached,
        )


def _top(steps: Sequence[Mapping[str, float]], k: int) -> TopK:
    """vLLM adds the sampled token to the k likeliest where it is none of them: k + 1 cells, of which the last goes."""
    ids = np.zeros((len(steps), k), np.int32)
    logprobs = np.full((len(steps), k), EMPTY_LOGPROB, np.float32)
    for row, step in enumerate(steps):
        best = sorted(step.items(), key=lambda cell: -cell[1])[:k]
        ids[row, : len(best)] = [int(name.removeprefix("token_id:")) for name, _ in best]
        logprobs[row, : len(best)] = [logprob for _, logprob in best]
    return TopK(token_ids=ids, logprobs=logprobs)


def _joined(tops: Sequence[TopK]) -> TopK:
    return TopK(
        token_ids=np.concatenate([top.token_ids for top in tops]),
        logprobs=np.concatenate([top.logprobs for top in tops]),
    )
