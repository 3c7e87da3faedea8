"""Answers of the OpenAI dialect told whole, or as server-sent events while they are made."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinsmith.engine.base import Piece, Sampled, SampledSequence
from tinsmith.errors import TinsmithError
from tinsmith.service.openai.asked import Asked
from tinsmith.service.openai.choices import Choice, Grown
from tinsmith.service.openai.direct import New
from tinsmith.service.openai.errors import shape_of
from tinsmith.service.openai.replies import Told, finite, head, rows, usage

Delta = Callable[[Asked, Told], dict[str, Any]]


def whole_choice(asked: Asked, index: int, sequence: SampledSequence) -> Told:
    """A finished sequence as a choice."""
    choice, tokens = asked.choice(), sequence.tokens.tolist()
    first, last = choice.feed(tokens), choice.end()
    return Told(
        index=index,
        grown=Grown(text=first.text + last.text, calls=(*first.calls, *last.calls)),
        tokens=tokens,
        logprobs=finite(sequence.logprobs),
        tops=rows(sequence.topk),
        finish=choice.finish(sequence.stop_reason),
    )


@dataclass(slots=True)
class _Growing:
    choice: Choice
    calls: int = 0
    offset: int = 0


async def events(
    asked: Asked,
    grown: AsyncGenerator[New],
    kind: str,
    delta: Delta,
    opening: Sequence[Mapping[str, Any]],
    more: Mapping[str, Any],
) -> AsyncGenerator[str]:
    """Chunks of `kind`, each choice told by `delta`; `opening` are choices that come first, the first of them with
    `more` beside it. Always ends in [DONE]."""
    extra = {"usage": None} if asked.body.stream_options.include_usage else {}
    for choice in opening:
        yield _event({**head(asked, kind), "choices": [choice], **extra, **more})
        more = {}
    said, answers = 0, []
    states = [_Growing(asked.choice()) for _ in range(len(asked.requests) * asked.body.n)]
    try:
        async with aclosing(grown):
            async for request, new in grown:
                first = request * asked.body.n
                if isinstance(new, Piece):
                    said += len(new.tokens)
                    told = [_piece(asked, first + new.sample, states[first + new.sample], new)]
                else:
                    answers.append(new)
                    told = [_last(first + at, states[first + at], one) for at, one in enumerate(new.sequences)]
                for one in told:
                    if _says_something(asked, one):
                        yield _event({**head(asked, kind), "choices": [delta(asked, one)], **extra})
        if extra:
            yield _event({**head(asked, kind), "choices": [], "usage": usage(asked, answers, said)})
    except TinsmithError as error:
        yield _event(shape_of(error))
    yield "data: [DONE]\n\n"


def _piece(asked: Asked, index: int, state: _Growing, piece: Piece) -> Told:
    grown = state.choice.feed(piece.tokens)
    told = Told(
        index=index,
        grown=grown,
        tokens=piece.tokens,
        logprobs=finite(np.array(piece.logprobs)),
        tops=rows(piece.topk),
        first_call=state.calls,
        offset=state.offset,
    )
    state.calls += len(grown.calls)
    if asked.top is not None:
        state.offset += sum(len(asked.words.spelled(token)[0]) for token in piece.tokens)
    return told


def _last(index: int, state: _Growing, sequence: SampledSequence) -> Told:
    grown = state.choice.end()
    return Told(index=index, grown=grown, finish=state.choice.finish(sequence.stop_reason), first_call=state.calls)


def _says_something(asked: Asked, told: Told) -> bool:
    with_tokens = bool(told.tokens) and (asked.top is not None or asked.body.return_token_ids)
    return bool(told.grown.text or told.grown.calls or told.finish or with_tokens)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def total(sampled: Sequence[Sampled]) -> int:
    """Tokens of all sequences."""
    return sum(len(sequence.tokens) for one in sampled for sequence in one.sequences)
