"""Requests in the sampler: what was asked, the answers in the making, and the finished record."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tinsmith.engine.base import Heard, ModelCard, Piece, Sampled, SampledSequence, SampleRequest, TopK
from tinsmith.engine.lora.adapter import Weights
from tinsmith.engine.sampling import prompt_logprobs, token_sampling
from tinsmith.engine.sampling.capacity import headroom, row_capacity
from tinsmith.engine.sampling.kv_cache import Row
from tinsmith.engine.sampling.prefix_cache import Trunk
from tinsmith.engine.sampling.token_sampling import Rule

Beginning = tuple[Trunk, bytes]
"""A prompt, and what it may be shared with."""


@dataclass(eq=False, slots=True)
class Answer:
    """One sample of a request in the making."""

    ask: Ask
    seed: int
    number: int
    row: Row | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopK] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] | None = None
    numbers: np.random.Generator = field(init=False)
    told: int = 0
    """Tokens that `heard` knows of."""

    def __post_init__(self) -> None:
        self.numbers = token_sampling.stream(self.seed, self.number)

    def add(self, token: int, logprob: float, ends: bool) -> None:
        """One more token; `ends` when it completes a stop string."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if ends or token in self.ask.stop_tokens:
            self.stop_reason = "stop"
        elif len(self.tokens) >= self.ask.limit:
            self.stop_reason = "length"

    def tell(self) -> None:
        """Let who wants to hear know what is new."""
        if self.ask.heard is None or self.told >= len(self.tokens):
            return
        new = slice(self.told, len(self.tokens))
        piece = Piece(
            sample=self.number,
            tokens=tuple(self.tokens[new]),
            logprobs=tuple(self.logprobs[new]),
            topk=_joined(self.tops[new]) if self.tops else None,
        )
        self.told = len(self.tokens)
        self.ask.heard(piece)

    @property
    def left(self) -> int:
        """Tokens that it may still say."""
        return self.ask.limit - len(self.tokens)

    def read(self) -> np.ndarray:
        """int32: the tokens whose keys and values its row holds: the prompt and all that was said but the last."""
        return np.concatenate([self.ask.request.prompt, np.array(self.tokens[:-1], np.int32)])

    def restart(self) -> None:
        """As if it had never begun."""
        self.numbers = token_sampling.stream(self.seed, self.number)
        self.row, self.stop_reason = None, None
        self.tokens, self.logprobs, self.tops = [], [], []


@dataclass(eq=False, slots=True)
class Ask:
    """One request, the adapter it samples from, its promise and its answers."""

    request: SampleRequest
    weights: Weights | None
    life: int
    """Which of the versions that had this name."""
    limit: int
    """Tokens that an answer may have at most."""
    stop_tokens: frozenset[int]
    result: asyncio.Future[Sampled]
    seed: int
    heard: Heard | None = None
    answers: list[Answer] = field(default_factory=list)
    prompt: prompt_logprobs.PromptAnswers | None = None
    found: int = 0
    """Tokens of the prompt that were known already."""

    @property
    def trunk(self) -> Trunk:
        """What this request may share with others."""
        return (self.request.version or "", self.life, self.request.space)

    @property
    def beginning(self) -> Beginning:
        """The same for requests whose answers may read their prompt together."""
        return self.trunk, self.request.prompt.tobytes()

    @property
    def room(self) -> int:
        """Tokens that each answer's row of the cache begins with."""
        length = len(self.request.prompt)
        return row_capacity(length + headroom(length, self.limit))

    @property
    def tail(self) -> int:
        """The same where the prompt has a row of its own."""
        return row_capacity(headroom(0, self.limit))

    @property
    def rule(self) -> Rule:
        asked = self.request
        return Rule(asked.temperature, asked.top_k, asked.top_p, asked.topk_sample_logprobs)

    def finish(self) -> None:
        """Keep the promise, once every answer has ended."""
        if all(answer.stop_reason for answer in self.answers) and not self.result.done():
            self.result.set_result(_sampled(self))


Faults = dict[Ask, Exception]
"""What went wrong with requests, each with its own."""


def ask_of(
    request: SampleRequest, weights: Weights | None, life: int, card: ModelCard, heard: Heard | None = None
) -> Ask:
    """A request taken in: what it left open gets its value here."""
    left = max(1, card.context_length - len(request.prompt))
    ask = Ask(
        request=request,
        weights=weights,
        life=life,
        limit=left if request.max_tokens is None else request.max_tokens,
        stop_tokens=frozenset(card.eos_token_ids if request.stop_tokens is None else request.stop_tokens),
        result=asyncio.get_running_loop().create_future(),
        seed=secrets.randbits(64) if request.seed is None else request.seed,
        heard=heard,
    )
    ask.answers = [Answer(ask, ask.seed, number) for number in range(request.num_samples)]
    return ask


def asks_of(answers: Sequence[Answer]) -> list[Ask]:
    """The requests behind these answers, each once."""
    return list({id(answer.ask): answer.ask for answer in answers}.values())


def told(answers: Sequence[Answer]) -> Faults:
    """Let those who want to hear know what is new; returns the requests that nobody could be told of."""
    faults: Faults = {}
    for answer in answers:
        try:
            answer.tell()
        except Exception as error:  # noqa: BLE001 - whoever listens to one request must not end the others
            faults[answer.ask] = error
    return faults


def _sampled(ask: Ask) -> Sampled:
    found = ask.prompt
    return Sampled(
        sequences=tuple(
            SampledSequence(
                tokens=np.array(answer.tokens, np.int32),
                logprobs=np.array(answer.logprobs, np.float32),
                stop_reason=answer.stop_reason or "length",
                topk=_joined(answer.tops) if answer.tops else None,
            )
            for answer in ask.answers
        ),
        prompt_logprobs=found.logprobs if found else None,
        topk_prompt=found.topk if found else None,
        target_prompt_logprobs=found.targets if found else None,
        prompt_alt=found.alt if found else None,
        prompt_cache_hit_tokens=ask.found,
    )


def _joined(tops: Sequence[TopK]) -> TopK:
    return TopK(
        token_ids=np.concatenate([top.token_ids for top in tops]),
        logprobs=np.concatenate([top.logprobs for top in tops]),
    )


def completes(tokenizer: Any, strings: Sequence[str], prompt: np.ndarray, said: Sequence[int], token: int) -> bool:
    """Whether with `token`, after `prompt` (int32 [N], N >= 1) and what was said, the text holds one of the strings.

    Every token spells a byte at least, so as many of the last as the longest string has bytes will do, and a few more.
    """
    if not strings:
        return False
    tail = max(len(string.encode()) for string in strings) + 4
    last = [*said[-tail:], token]
    text = tokenizer.decode(last) if len(said) > tail else _behind(tokenizer, int(prompt[-1]), last)
    return any(string in text for string in strings)


def _behind(tokenizer: Any, before: int, tokens: Sequence[int]) -> str:
    """The text of tokens after another: decoders of the SentencePiece kind take the first space of a text away."""
    text, front = tokenizer.decode([before, *tokens]), tokenizer.decode([before])
    if text.startswith(front):
        return text[len(front) :]
    return tokenizer.decode(tokens)  # half a character, which the first of the tokens went on with
