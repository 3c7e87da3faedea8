"""What clients of the OpenAI dialect are answered, whole or in chunks, with logprobs and token ids.

`system_fingerprint` names the weights that answered.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinsmith.chat.tool_calls import Call
from tinsmith.engine.base import SampledSequence, SampleResult, SequenceDelta, TopK
from tinsmith.errors import TinsmithError
from tinsmith.service.openai.requests import Asked
from tinsmith.service.openai.sampling import Choice, Finish, Grown, New
from tinsmith.service.openai.schemas import shape_of

CALL_ID = 9
"""Letters and digits of a tool call's id: Mistral's templates take nothing else back."""

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

Tops = Sequence[Sequence[tuple[int, float]]]
"""The likeliest (token, logprob) pairs of each position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A stretch of one choice: what it has grown by, and the tokens behind that."""

    index: int
    grown: Grown
    tokens: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    tops: Tops = ()
    finish: Finish | None = None
    first_call: int = 0
    """Calls of this choice that were told before."""
    offset: int = 0
    """Characters of its tokens that were told before."""


def rows(topk: TopK | None) -> Tops:
    """The cells of a TopK that are not empty."""
    if topk is None:
        return ()
    pairs = zip(topk.token_ids.tolist(), topk.logprobs.tolist(), strict=True)
    return [[(token, p) for token, p in zip(*row, strict=True) if p > -99999] for row in pairs]


def finite(logprobs: np.ndarray) -> list[float | None]:
    """As JSON can say them; None for no number."""
    return [None if np.isnan(p) else max(float(p), FLOOR) for p in logprobs]


def head(asked: Asked, kind: str) -> dict[str, Any]:
    """What every reply and every chunk begins with."""
    return {
        "id": asked.id,
        "object": kind,
        "created": asked.created,
        "model": asked.body.model,
        "system_fingerprint": asked.named.weights,
    }


def usage(asked: Asked, sampled: Sequence[SampleResult], said: int) -> dict[str, Any]:
    """Tokens of the prompts (each once), of the answers, and of the prompts those that were in the cache."""
    prompt = sum(len(request.prompt) for request in asked.requests)
    cached = sum(one.prompt_cache_hit_tokens for one in sampled)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_choice(asked: Asked, told: Told) -> dict[str, Any]:
    """A choice of a whole chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": told.grown.text or None, "refusal": None}
    if told.grown.calls:
        message["tool_calls"] = [_call(call) for call in told.grown.calls]
    elif message["content"] is None:
        message["content"] = ""
    return _with_ids(
        asked, told, {"index": told.index, "message": message, "finish_reason": told.finish}, _chat_logprobs
    )


def chat_delta(asked: Asked, told: Told) -> dict[str, Any]:
    """A choice of a chunk of a chat completion."""
    delta: dict[str, Any] = {"content": told.grown.text} if told.grown.text or not told.grown.calls else {}
    if told.finish and not told.grown.text:
        delta = {}
    if told.grown.calls:
        numbered = enumerate(told.grown.calls, told.first_call)
        delta["tool_calls"] = [{"index": number, **_call(call)} for number, call in numbered]
    return _with_ids(asked, told, {"index": told.index, "delta": delta, "finish_reason": told.finish}, _chat_logprobs)


def text_choice(asked: Asked, told: Told) -> dict[str, Any]:
    """A choice of a completion, whole or of a chunk."""
    choice = {"index": told.index, "text": told.grown.text, "finish_reason": told.finish}
    return _with_ids(asked, told, choice, _text_logprobs)


def spelled(asked: Asked, token: int) -> str:
    """A token as a text of its own, or as token_id:N."""
    return f"token_id:{token}" if asked.body.return_tokens_as_token_ids else asked.words.spelled(token)[0]


def _with_ids(asked: Asked, told: Told, choice: dict[str, Any], logprobs: Any) -> dict[str, Any]:
    choice["logprobs"] = logprobs(asked, told) if asked.top is not None and told.tokens else None
    if asked.body.return_token_ids:
        choice["token_ids"] = list(told.tokens)
    return choice


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": uuid.uuid4().hex[:CALL_ID], "type": "function", "function": function}


def _chat_logprobs(asked: Asked, told: Told) -> dict[str, Any]:
    tops = told.tops or [()] * len(told.tokens)
    content = [
        {**_entry(asked, token, p), "top_logprobs": [_entry(asked, *pair) for pair in top]}
        for token, p, top in zip(told.tokens, told.logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def _entry(asked: Asked, token: int, logprob: float | None) -> dict[str, Any]:
    raw = asked.words.spelled(token)[1]
    return {"token": spelled(asked, token), "logprob": logprob, "bytes": list(raw) if raw is not None else None}


def _text_logprobs(asked: Asked, told: Told) -> dict[str, Any]:
    """The token itself is always among the likeliest that are told."""
    tops = told.tops or [()] * len(told.tokens)
    texts = [asked.words.spelled(token)[0] for token in told.tokens]
    ends = np.cumsum([told.offset, *map(len, texts)])
    return {
        "tokens": [spelled(asked, token) for token in told.tokens],
        "token_logprobs": list(told.logprobs),
        "top_logprobs": [
            None if p is None else {spelled(asked, one): q for one, q in (*top, (token, p))}
            for token, p, top in zip(told.tokens, told.logprobs, tops, strict=True)
        ],
        "text_offset": ends[:-1].tolist(),
    }


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
                if isinstance(new, SequenceDelta):
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


def _piece(asked: Asked, index: int, state: _Growing, piece: SequenceDelta) -> Told:
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


def total(sampled: Sequence[SampleResult]) -> int:
    """Tokens of all sequences."""
    return sum(len(sequence.tokens) for one in sampled for sequence in one.sequences)
