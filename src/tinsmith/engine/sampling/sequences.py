"""Sampling jobs (one for each request), their sequences, and stop strings."""

from __future__ import annotations

import asyncio
import collections.abc
import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tinsmith.engine.base import ModelCard, OnDelta, SampledSequence, SampleRequest, SampleResult, SequenceDelta, TopK
from tinsmith.engine.images.rows import content_ids, rotary_offset
from tinsmith.engine.lora.adapter import AdapterWeights
from tinsmith.engine.sampling import token_sampling
from tinsmith.engine.sampling.capacity import headroom, row_capacity
from tinsmith.engine.sampling.kv_cache import CacheRow
from tinsmith.engine.sampling.paged.pages import PagedRow
from tinsmith.engine.sampling.prefixes.cache import PrefixScope
from tinsmith.engine.sampling.prompt_logprobs import PromptResults
from tinsmith.engine.sampling.token_sampling import SamplingRule
from tinsmith.errors import EngineError, TinsmithError

PromptKey = tuple[PrefixScope, bytes]
"""A prompt with the scope in which it may be shared."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a job: its tokens so far and its cache row."""

    job: SampleJob
    seed: int
    number: int
    """Index of the sample in its request."""
    row: CacheRow | PagedRow | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopK] = field(default_factory=list)
    routed_experts: list[np.ndarray] = field(default_factory=list)
    """Records [layers, k] of the tokens that were fed, all but the last, if the request records them."""
    stop_reason: Literal["stop", "length"] | None = None
    uniforms: np.random.Generator = field(init=False)
    emitted: int = 0
    """Tokens that were passed to `on_delta`."""

    def __post_init__(self) -> None:
        self.uniforms = token_sampling.uniform_stream(self.seed, self.number)

    def append(self, token: int, logprob: float, completes_stop: bool) -> None:
        """Add a token; `completes_stop` says whether it completes a stop string."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if completes_stop or token in self.job.stop_tokens:
            self.stop_reason = "stop"
        elif len(self.tokens) >= self.job.max_tokens:
            self.stop_reason = "length"

    def emit(self) -> None:
        """Pass the tokens that are new since the last call to the job's `on_delta`."""
        if self.job.on_delta is None or self.emitted >= len(self.tokens):
            return
        new = slice(self.emitted, len(self.tokens))
        delta = SequenceDelta(
            sample=self.number,
            tokens=tuple(self.tokens[new]),
            logprobs=tuple(self.logprobs[new]),
            topk=TopK.concatenate(self.top_logprobs[new]) if self.top_logprobs else None,
        )
        self.emitted = len(self.tokens)
        self.job.on_delta(delta)

    @property
    def outgrows_factors(self) -> bool:
        """Whether the next token makes the row too long for the rotary embeddings that its cached keys have."""
        return self.row is not None and 0 < self.row.position == self.job.original_context

    @property
    def remaining(self) -> int:
        """Tokens that may still be sampled."""
        return self.job.max_tokens - len(self.tokens)

    @property
    def position(self) -> int:
        """Position of the next token for rotary embeddings; its complement with long factors (`longrope`)."""
        assert self.row is not None
        position = self.row.position + self.job.rotary_offset
        return ~position if self.job.has_long_factors(self.row.position + 1) else position

    def cached_tokens(self) -> np.ndarray:
        """Ids of the tokens whose keys and values the row holds: the prompt's and all samples but the last."""
        return np.concatenate([self.job.prompt_ids, np.array(self.tokens[:-1], np.int32)])

    def cached_routed_experts(self) -> np.ndarray | None:
        """The record [N, layers, k] of the same tokens, if the request records it."""
        prompt = self.job.prompt_routed_experts
        return None if prompt is None else np.concatenate([prompt, _stacked(self.routed_experts, prompt)])

    def reset(self) -> None:
        """Return to the state before the first token; emitted tokens stay counted, and are sampled equal again."""
        self.uniforms = token_sampling.uniform_stream(self.seed, self.number)
        self.row, self.stop_reason = None, None
        self.tokens, self.logprobs, self.top_logprobs, self.routed_experts = [], [], [], []

    def result(self) -> SampledSequence:
        """The finished sequence."""
        return SampledSequence(
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            stop_reason=self.stop_reason or "length",
            topk=TopK.concatenate(self.top_logprobs) if self.top_logprobs else None,
            routed_experts=None
            if (prompt := self.job.prompt_routed_experts) is None
            else _stacked(self.routed_experts, prompt),
        )


def _stacked(rows: list[np.ndarray], like: np.ndarray) -> np.ndarray:
    """Records [layers, k] of single tokens as one, also of none."""
    return np.stack(rows) if rows else like[:0]


@dataclass(eq=False, slots=True)
class SampleJob:
    """One request in the sampler, with its adapter, its sequences and the future of its result."""

    request: SampleRequest
    weights: AdapterWeights | None
    generation: int
    """Generation of the version's name."""
    max_tokens: int
    """Limit for each sequence."""
    stop_tokens: frozenset[int]
    future: asyncio.Future[SampleResult]
    seed: int
    original_context: int
    """As in the base's card."""
    on_delta: OnDelta | None = None
    sequences: list[Sequence] = field(default_factory=list)
    prompt_results: PromptResults | None = None
    cached_tokens: int = 0
    """Tokens of the prompt that were in the prefix cache."""
    prompt_routed_experts: np.ndarray | None = None
    """The record [N, layers, k] of the prompt's experts, if the request records it."""
    prompt_ids: np.ndarray = field(init=False)
    """[N]: the prompt's tokens, and ids of what its images show."""
    rotary_offset: int = field(init=False)
    """Position of a sampled token less the number of tokens before it; 0 unless the prompt has images."""

    def __post_init__(self) -> None:
        self.prompt_ids = content_ids(self.request.prompt, self.request.images)
        self.rotary_offset = rotary_offset(self.request.images)

    @classmethod
    def of(
        cls,
        request: SampleRequest,
        weights: AdapterWeights | None,
        generation: int,
        card: ModelCard,
        on_delta: OnDelta | None,
    ) -> SampleJob:
        """A job with the defaults of a request filled in. Needs a running event loop."""
        context_left = max(1, card.context_length - len(request.prompt))
        job = cls(
            request=request,
            weights=weights,
            generation=generation,
            max_tokens=context_left if request.max_tokens is None else request.max_tokens,
            stop_tokens=frozenset(card.eos_token_ids if request.stop_tokens is None else request.stop_tokens),
            future=asyncio.get_running_loop().create_future(),
            seed=secrets.randbits(64) if request.seed is None else request.seed,
            original_context=card.original_context,
            on_delta=on_delta,
        )
        numbers = range(request.first_sample, request.first_sample + request.num_samples)
        job.sequences = [Sequence(job, job.seed, number) for number in numbers]
        return job

    @property
    def scope(self) -> PrefixScope:
        """The part of the prefix cache that the prompt may use."""
        return self.scope_of(len(self.request.prompt))

    def has_long_factors(self, length: int) -> bool:
        """Whether a row of `length` tokens takes the long factors of `longrope`."""
        return 0 < self.original_context < length

    def scope_of(self, length: int) -> PrefixScope:
        """The part of the prefix cache that a row of `length` tokens may use. Jobs that record routed experts share
        only with others that do, because the cache has no others' records; rows with long factors share only with
        each other."""
        space = f"{self.request.cache_scope}\nrouted" if self.request.routed_experts else self.request.cache_scope
        space += "\nlong factors" if self.has_long_factors(length) else ""
        return (self.request.version or "", self.generation, space)

    @property
    def prompt_key(self) -> PromptKey:
        """Equal for jobs whose sequences may share a prompt row."""
        return self.scope, self.prompt_ids.dtype.char.encode() + self.prompt_ids.tobytes()

    @property
    def cache_reserve(self) -> int:
        """Capacity of the cache row with which a sequence starts."""
        length = len(self.request.prompt)
        return row_capacity(length + headroom(length, self.max_tokens))

    @property
    def cache_reserve_after_prefix(self) -> int:
        """The same where the prompt has a row of its own."""
        return row_capacity(headroom(0, self.max_tokens))

    @property
    def rule(self) -> SamplingRule:
        request = self.request
        return SamplingRule(request.temperature, request.top_k, request.top_p, request.topk_sample_logprobs)

    def finish(self) -> None:
        """Set the result, if every sequence has ended."""
        if all(sequence.stop_reason for sequence in self.sequences) and not self.future.done():
            self.future.set_result(self._result())

    def fail(self, error: Exception) -> None:
        """Set an error as the result, unless there is one already."""
        if not self.future.done():
            if not isinstance(error, TinsmithError):
                error = EngineError(f"Sampling failed: {error!r}")
            self.future.set_exception(error)

    def _result(self) -> SampleResult:
        prompt = self.prompt_results
        return SampleResult(
            sequences=tuple(sequence.result() for sequence in self.sequences),
            prompt_logprobs=prompt.logprobs if prompt else None,
            topk_prompt=prompt.topk if prompt else None,
            target_prompt_logprobs=prompt.targets if prompt else None,
            prompt_alt=prompt.alternatives if prompt else None,
            prompt_routed_experts=self.prompt_routed_experts,
            prompt_tokens=len(self.request.prompt) if self.request.images else 0,
            prompt_cache_hit_tokens=self.cached_tokens,
        )


def jobs_of(sequences: collections.abc.Iterable[Sequence]) -> list[SampleJob]:
    """The jobs of these sequences, each once."""
    return list({id(sequence.job): sequence.job for sequence in sequences}.values())


def completes_stop_string(
    tokenizer: Any,
    stop_strings: collections.abc.Sequence[str],
    prompt: np.ndarray,
    sampled: collections.abc.Sequence[int],
    token: int,
) -> bool:
    """Whether the text of the sampled tokens with `token` holds a stop string; `prompt` is int32 [N], N >= 1.

    Every token spells at least one byte, so it is enough to decode as many of the last tokens as the longest string has
    bytes, and a few more.
    """
    if not stop_strings:
        return False
    tail = max(len(string.encode()) for string in stop_strings) + 4
    last = [*sampled[-tail:], token]
    text = tokenizer.decode(last) if len(sampled) > tail else _text_after(tokenizer, int(prompt[-1]), last)
    return any(string in text for string in stop_strings)


def _text_after(tokenizer: Any, previous: int, tokens: collections.abc.Sequence[int]) -> str:
    """The text of tokens after a previous one: decoders of the SentencePiece kind drop the first space of a text."""
    text, prefix = tokenizer.decode([previous, *tokens]), tokenizer.decode([previous])
    if text.startswith(prefix):
        return text[len(prefix) :]
    return tokenizer.decode(tokens)  # the previous token ends in part of a character, which these tokens complete
