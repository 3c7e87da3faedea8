"""Sampling: settings, requests, and the middleware around them.

A workflow, a reward or an evaluation samples from a `Snapshot`. Each of its requests passes through a list of
functions, the middleware, to the function that sends it to the server: `Sample` takes a request and returns the result,
and a `Middleware` takes a request and the next `Sample`. So a sampling method is one function.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field, StrictInt, field_validator
from typing_extensions import override

from tinsmith.chat.request import PromptTooLong
from tinsmith.plurals import counted
from tinsmith.rl.plugins import CustomPart, Kind, import_object, path_text
from tinsmith.rl.policy.chat import ChatCodec, Messages
from tinsmith.rl.types import EncodedPrompt, Message, Tokens, Turn
from tinsmith.settings import Settings


class SamplingMethod(CustomPart):
    """User code: an async function of a request for replies and of `sample`, which sends it on.

    Example: async def cooler(request, sample): return await sample(replace(request, seed=request.seed + 1))
    """

    kind: ClassVar[Kind] = "sampling method"
    type: Literal["custom"] = "custom"

    @override
    def check_code(self) -> None:
        if not inspect.iscoroutinefunction(import_object(self.path)):
            raise ValueError(f"{path_text(self.path)} is not an async function; define it with async def")
        _ = self._function

    @cached_property
    def _function(self) -> Callable[..., Any]:
        return self.function_of("request", "sample")[0]

    async def around(self, request: SampleRequest, sample: Sample) -> SampleResult:
        """The result of the function. Raises ConfigError if it does not hold the replies of the request."""
        result = await self._function(request, sample)
        if not isinstance(result, SampleResult):
            raise self.fault(f"returned {result!r:.80}", "Return what `sample` returned, or a copy by replace.")
        if len(result.turns) != request.count:
            replies = counted(len(result.turns), "reply")
            raise self.fault(f"returned {replies} instead of {request.count}", "Return `request.count` replies.")
        return result


class SamplingConfig(Settings):
    """Sampling of replies."""

    max_tokens: int = Field(default=512, ge=1)
    """Maximum number of tokens of a reply."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of a prompt; rollouts with a longer one fail. Not set: the limit of the server."""
    max_total_tokens: int | None = Field(default=None, ge=2)
    """Maximum number of tokens of prompt and reply together: a longer prompt leaves a shorter reply, and rollouts whose
    prompt leaves none fail. Not set: the limit of the server."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy. At 1 the sampler draws from the policy that is trained; for other values see
    algorithm.old_logprobs."""
    top_p: float = Field(default=1.0, ge=0, le=1)
    """Nucleus sampling: sample from the most likely tokens with this total probability; 0 is greedy."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample from this many most likely tokens; -1: all."""
    stop: tuple[str | StrictInt, ...] | None = None
    """Strings or token ids, or one of them, that end a reply. Not set: the model's end-of-turn tokens. Empty: only
    max_tokens."""
    method: SamplingMethod | None = None
    """A function of your own around each request for replies: docs/code/extend.md."""

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: tuple[str | int, ...] | None) -> tuple[str | int, ...] | None:
        if stop and len({type(text_or_token) for text_or_token in stop}) > 1:
            raise ValueError("stop takes strings or token ids, not both")
        if stop and "" in stop:
            raise ValueError("a stop string is empty: give text")
        return stop

    def max_reply(self, prompt_tokens: int) -> int:
        """Maximum number of tokens of a reply to a prompt of this length."""
        room = self.max_tokens if self.max_total_tokens is None else self.max_total_tokens - prompt_tokens
        return min(self.max_tokens, room)

    @property
    def is_greedy(self) -> bool:
        """Whether equal prompts get equal replies."""
        return self.temperature == 0 or self.top_p == 0

    @property
    def restricts(self) -> bool:
        """Whether some tokens are never sampled, so that the sampling distribution is not softmax(logits / T)."""
        return self.temperature == 0 or self.top_p < 1 or self.top_k > 0


Prompt = Messages | Tokens


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the prompt's tokens at temperature 1."""

    last: int | None = None
    """Only those of the last tokens; None: of all but the first."""


@dataclass(frozen=True, slots=True)
class NextLogprobs:
    """Logprobs of the token after the prompt at temperature 1."""

    ids: tuple[int, ...] = ()
    """Of these tokens."""
    top: int = 0
    """Without `ids`: of this many likeliest tokens."""


@dataclass(frozen=True, slots=True)
class TopPromptLogprobs:
    """The likeliest tokens at each position of the prompt, with their logprobs at temperature 1."""

    top: int
    """Number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A request to a model: to sample replies to a prompt, or to score tokens.

    Example: SampleRequest(prompt=task.messages, count=8, seed=7, sampling=SamplingConfig(max_tokens=64))
    """

    prompt: Prompt
    """A chat, or tokens. A Turn in the chat stands for its own tokens."""
    count: int = 0
    """Number of replies; 0 in requests that only score tokens."""
    seed: int = 0
    """Seed of the replies."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Settings of the replies."""
    logprobs: PromptLogprobs | NextLogprobs | TopPromptLogprobs | None = None
    """The logprobs to compute, in requests without replies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """Result of a request: its replies, or its logprobs."""

    turns: tuple[Turn, ...] = ()
    """The replies."""
    sequence_ids: tuple[str, ...] = ()
    """The server's ids of the replies; empty if it has none."""
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """float32 [N]: the logprobs."""
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [K]: the tokens of the logprobs, for the likeliest tokens."""


Sample = Callable[[SampleRequest], Awaitable[SampleResult]]
"""Sends a request, and returns its result."""
Middleware = Callable[[SampleRequest, Sample], Awaitable[SampleResult]]
"""A function around `Sample`: it may change the request, the result, or send the request more than once."""


def through(sample: Sample, *middleware: Middleware) -> Sample:
    """Return `sample` with functions around it, the first one outermost."""
    for function in reversed(middleware):
        sample = _around(sample, function)
    return sample


def _around(sample: Sample, function: Middleware) -> Sample:
    return lambda request: function(request, sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """A model at one version."""

    version: int
    """Number of updates of the weights."""
    chat: ChatCodec
    """The chat codec of the model."""
    sample: Sample
    """Sends a request to the model."""
    open_model: Callable[[str], Awaitable[Snapshot]]
    """Opens another model of the same server."""


class Snapshot:
    """A model to sample from, and the middleware around its requests.

    It has one version, or follows the newest weights (`following`).
    """

    def __init__(self, model: ModelVersion | Callable[[], ModelVersion], middleware: Sequence[Middleware] = ()) -> None:
        """`model`: a version, or a function that returns the version for a request. The first function of `middleware`
        is the outermost."""
        self._model = (lambda: model) if isinstance(model, ModelVersion) else model
        self._middleware = tuple(middleware)

    @property
    def version(self) -> int:
        """Number of updates of the weights."""
        return self._model().version

    @property
    def chat(self) -> ChatCodec:
        """The chat codec of the model."""
        return self._model().chat

    async def sample(self, prompt: Prompt, *, count: int, seed: int, sampling: SamplingConfig) -> tuple[Turn, ...]:
        """Sample `count` replies to a chat or to tokens, deterministically by `seed`.

        A Turn in the chat is encoded as its own tokens, so that the prompt extends it. Raises PromptTooLong.
        """
        return (await self._send(SampleRequest(prompt=prompt, count=count, seed=seed, sampling=sampling))).turns

    async def open_model(self, name: str) -> Snapshot:
        """Open another model of this server: a base model by name, or a tinker:// path; with an empty name, the base
        model of the run."""
        return await self._model().open_model(name)

    async def logprobs(self, tokens: Tokens, last: int | None = None) -> np.ndarray:
        """Return logprobs of tokens 1 to N at temperature 1, float32 [N], for N + 1 tokens.

        With `last`, return only those of the last tokens, float32 [last]; the server may have cached the others.
        """
        return (await self._send(SampleRequest(prompt=tokens, logprobs=PromptLogprobs(last)))).logprobs

    async def next_logprobs(self, tokens: Sequence[int], ids: Sequence[int]) -> np.ndarray:
        """Return the logprobs at temperature 1 of K ids as the token after `tokens`, float32 [K]."""
        return (await self._send(SampleRequest(prompt=tokens, logprobs=NextLogprobs(tuple(ids))))).logprobs

    async def top_logprobs(self, tokens: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the `count` likeliest tokens after `tokens`, int64 [K], and their logprobs at temperature 1,
        float32 [K]. K is smaller than `count` if the vocabulary is."""
        result = await self._send(SampleRequest(prompt=tokens, logprobs=NextLogprobs(top=count)))
        return result.ids, result.logprobs

    async def top_prompt_logprobs(self, tokens: Tokens, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the `count` likeliest tokens in place of tokens 1 to N, int64 [N, K], and their logprobs at
        temperature 1, float32 [N, K]. K is smaller than `count` if the vocabulary is."""
        result = await self._send(SampleRequest(prompt=tokens, logprobs=TopPromptLogprobs(count)))
        return result.ids, result.logprobs

    def pinned(self) -> Snapshot:
        """Return a snapshot of one version: of a snapshot that follows the newest weights, the weights of now."""
        return Snapshot(self._model(), self._middleware)

    def around(self, function: Middleware) -> Snapshot:
        """Return this snapshot with `function` around all others. Models opened from it are without."""
        return Snapshot(self._model, (function, *self._middleware))

    def around_each_request(self, function: Middleware) -> Snapshot:
        """Return this snapshot with `function` innermost, around each request to the server, also of models that are
        opened from it."""

        async def open_model(name: str) -> Snapshot:
            return (await self.open_model(name)).around_each_request(function)

        def model() -> ModelVersion:
            current = self._model()
            return replace(current, sample=through(current.sample, function), open_model=open_model)

        return Snapshot(model, self._middleware)

    async def _send(self, request: SampleRequest) -> SampleResult:
        """Send a request through the middleware to one version, so that requests which follow from it use the same."""
        method = request.sampling.method if request.count else None
        middleware = (method.around, *self._middleware) if method is not None else self._middleware
        return await through(self._model().sample, *middleware)(request)

    @classmethod
    def following(cls, newest: Callable[[], Snapshot]) -> Snapshot:
        """Return a snapshot that uses the newest weights for each request, with the middleware of the present ones."""
        return cls(lambda: newest()._model(), newest()._middleware)


def rendering(chat: ChatCodec) -> Middleware:
    """Encode prompts as tokens."""

    async def render(request: SampleRequest, sample: Sample) -> SampleResult:
        return await sample(replace(request, prompt=encoded(request.prompt, chat)))

    return render


def encoded(prompt: Prompt, chat: ChatCodec) -> EncodedPrompt:
    """The tokens of a chat, or the tokens themselves."""
    if isinstance(prompt, EncodedPrompt):
        return prompt
    parts = [part for part in prompt if isinstance(part, Message | Turn)]
    return chat.encode(parts) if parts else EncodedPrompt(tokens=tuple(int(cast(int, part)) for part in prompt))


async def check_prompt_length(request: SampleRequest, sample: Sample) -> SampleResult:
    """Raise PromptTooLong if an encoded prompt is longer than max_prompt_tokens, or leaves no room for a reply."""
    sampling, length = request.sampling, len(request.prompt)
    if request.count and sampling.max_reply(length) < 1:
        raise PromptTooLong(
            f"The prompt has {counted(length, 'token')}, and sampling.max_total_tokens is "
            f"{sampling.max_total_tokens}, so that there is no room for a reply.",
            "Raise it, or shorten the task.",
        )
    if request.count and sampling.max_prompt_tokens is not None and length > sampling.max_prompt_tokens:
        raise PromptTooLong(
            f"The prompt has {counted(length, 'token')}, sampling.max_prompt_tokens is {sampling.max_prompt_tokens}.",
            "Raise it, or shorten the task.",
        )
    return await sample(request)


def recomputing(recomputes: Callable[[SamplingConfig], bool]) -> Middleware:
    """Compute the logprobs of replies again, at temperature 1, with one more request each, if `recomputes` says so of
    their settings."""

    async def recompute(request: SampleRequest, sample: Sample) -> SampleResult:
        result = await sample(request)
        if not result.turns or not recomputes(request.sampling):
            return result

        async def recomputed(turn: Turn) -> Turn:
            scored = await sample(SampleRequest(prompt=turn.sequence, logprobs=PromptLogprobs()))
            return replace(turn, logprobs=tuple(map(float, scored.logprobs[len(scored.logprobs) - len(turn.tokens) :])))

        return replace(result, turns=tuple(await asyncio.gather(*map(recomputed, result.turns))))

    return recompute


def request_seed(run_seed: int, *place: int) -> int:
    """Return the 31-bit seed of a sampling request, derived from the run's seed and the request's place in the run."""
    return int(np.random.SeedSequence((run_seed, *place)).generate_state(1)[0] & 0x7FFFFFFF)
