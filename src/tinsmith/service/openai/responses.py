"""Responses of the OpenAI API, whole or as server-sent events, with logprobs and token ids.

`system_fingerprint` names the weights that answered.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tinsmith.chat.choice_decoder import ChoiceDecoder, FinishReason, TextDelta
from tinsmith.chat.completions import by_text
from tinsmith.chat.errors import ENDINGS, as_tinsmith_error, openai_error_of
from tinsmith.chat.strict_json import encode_json
from tinsmith.engine.base import SampledSequence, SampleResult, SequenceDelta, TopK
from tinsmith.service.openai.requests import PreparedRequest
from tinsmith.service.openai.sampling import SampleEvent

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no number for."""

TopLogprobs = Sequence[Sequence[tuple[int, float]]]
"""The most likely (token, logprob) pairs of each position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """New output of one choice, or a whole choice: text and tool calls, with the tokens that they come from."""

    index: int
    delta: TextDelta
    tokens: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    top_logprobs: TopLogprobs = ()
    finish: FinishReason | None = None
    first_call: int = 0
    """Tool calls of this choice in earlier deltas."""
    offsets: Sequence[int] = ()
    """Characters of the choice's text before each token's."""


def top_logprobs_of(topk: TopK | None) -> TopLogprobs:
    """The non-empty cells of a TopK."""
    if topk is None:
        return ()
    pairs = zip(topk.token_ids.tolist(), topk.logprobs.tolist(), strict=True)
    return [[(token, p) for token, p in zip(*row, strict=True) if p > -99999] for row in pairs]


def json_logprobs(logprobs: np.ndarray) -> list[float | None]:
    """Logprobs as JSON numbers: None for NaN, MIN_LOGPROB for minus infinity."""
    return [None if np.isnan(p) else max(float(p), MIN_LOGPROB) for p in logprobs]


def response_head(call: PreparedRequest, kind: str) -> dict[str, Any]:
    """Fields that every response and every chunk begins with."""
    return {
        "id": call.id,
        "object": kind,
        "created": call.created,
        "model": call.body.model,
        "system_fingerprint": call.model.weights,
    }


def usage(call: PreparedRequest, sampled: Sequence[SampleResult], completion_tokens: int) -> dict[str, Any]:
    """Token counts; a prompt counts once, however often it is sampled."""
    prompt = sum(result.prompt_tokens for result in sampled) or sum(len(request.prompt) for request in call.requests)
    cached = sum(result.prompt_cache_hit_tokens for result in sampled)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def sampled_tokens(sampled: Sequence[SampleResult]) -> int:
    """Tokens of all sequences."""
    return sum(len(sequence.tokens) for result in sampled for sequence in result.sequences)


def chat_choice(call: PreparedRequest, choice: ChoiceDelta) -> dict[str, Any]:
    """A choice of a whole chat completion."""
    delta = choice.delta
    message: dict[str, Any] = {"role": "assistant", "content": delta.text or None, "refusal": None}
    if delta.calls:
        message["tool_calls"] = [tool_call.to_json() for tool_call in delta.calls]
    elif message["content"] is None:
        message["content"] = ""
    return _with_tokens(
        call, choice, {"index": choice.index, "message": message, "finish_reason": choice.finish}, _chat_logprobs
    )


def chat_delta(call: PreparedRequest, choice: ChoiceDelta) -> dict[str, Any]:
    """A choice of a chunk of a chat completion."""
    text, calls = choice.delta.text, choice.delta.calls
    delta: dict[str, Any] = {"content": text} if text or not calls else {}
    if choice.finish and not text:
        delta = {}
    if calls:
        numbered = enumerate(calls, choice.first_call)
        delta["tool_calls"] = [{"index": number, **tool_call.to_json()} for number, tool_call in numbered]
    return _with_tokens(
        call, choice, {"index": choice.index, "delta": delta, "finish_reason": choice.finish}, _chat_logprobs
    )


def text_choice(call: PreparedRequest, choice: ChoiceDelta) -> dict[str, Any]:
    """A choice of a completion, whole or of a chunk."""
    body = {"index": choice.index, "text": choice.delta.text, "finish_reason": choice.finish}
    return _with_tokens(call, choice, body, _text_logprobs)


def token_text(call: PreparedRequest, token: int) -> str:
    """A token as text, or as `token_id:N` if the request says so."""
    return f"token_id:{token}" if call.body.return_tokens_as_token_ids else call.tokenizer.texts.of(token)[0]


def token_key(call: PreparedRequest, token: int) -> str:
    """A token as a completion's logprobs name it: as `token_text`, or as `bytes:` if it is no text of its own."""
    text, raw = call.tokenizer.texts.of(token)
    if call.body.return_tokens_as_token_ids or text.encode() == raw:
        return token_text(call, token)
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _with_tokens(call: PreparedRequest, choice: ChoiceDelta, body: dict[str, Any], logprobs: Any) -> dict[str, Any]:
    body["logprobs"] = logprobs(call, choice) if call.top_logprobs is not None and choice.tokens else None
    if call.body.return_token_ids:
        body["token_ids"] = list(choice.tokens)
    return body


def _chat_logprobs(call: PreparedRequest, choice: ChoiceDelta) -> dict[str, Any]:
    tops = choice.top_logprobs or [()] * len(choice.tokens)
    content = [
        {**_entry(call, token, p), "top_logprobs": [_entry(call, *pair) for pair in top]}
        for token, p, top in zip(choice.tokens, choice.logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def _entry(call: PreparedRequest, token: int, logprob: float | None) -> dict[str, Any]:
    return {"token": token_text(call, token), "logprob": logprob, "bytes": list(call.tokenizer.texts.of(token)[1])}


def _text_logprobs(call: PreparedRequest, choice: ChoiceDelta) -> dict[str, Any]:
    tops = choice.top_logprobs or [()] * len(choice.tokens)
    return {
        "tokens": [token_key(call, token) for token in choice.tokens],
        "token_logprobs": list(choice.logprobs),
        "top_logprobs": [
            None if p is None else by_text((other, token_key(call, other), q) for other, q in [(token, p), *top])
            for token, p, top in zip(choice.tokens, choice.logprobs, tops, strict=True)
        ],
        "text_offset": list(choice.offsets),
    }


RenderChoice = Callable[[PreparedRequest, ChoiceDelta], dict[str, Any]]


def whole_choice(call: PreparedRequest, index: int, sequence: SampledSequence) -> ChoiceDelta:
    """A finished sequence as a choice."""
    decoder, tokens = call.decoder(index), sequence.tokens.tolist()
    first, last = decoder.feed(tokens), decoder.end()
    return ChoiceDelta(
        index=index,
        delta=TextDelta(text=first.text + last.text, calls=(*first.calls, *last.calls)),
        tokens=tokens,
        logprobs=json_logprobs(sequence.logprobs),
        top_logprobs=top_logprobs_of(sequence.topk),
        offsets=decoder.offsets,
        finish=decoder.finish_reason(sequence.stop_reason),
    )


@dataclass(slots=True)
class _ChoiceState:
    """A choice of a stream. A token is sent when the text before it was."""

    decoder: ChoiceDecoder
    calls: int = 0
    sent: int = 0
    """Tokens that were sent."""
    waiting: list[tuple[int, float | None, Sequence[tuple[int, float]]]] = field(default_factory=list)
    """(token, logprob, top logprobs) of those that were not."""

    def feed(self, index: int, piece: SequenceDelta) -> ChoiceDelta:
        """Add tokens."""
        tops = top_logprobs_of(piece.topk) or [()] * len(piece.tokens)
        self.waiting += zip(piece.tokens, json_logprobs(np.array(piece.logprobs)), tops, strict=True)
        return self._choice(index, self.decoder.feed(piece.tokens))

    def end(self, index: int, sequence: SampledSequence) -> ChoiceDelta:
        """The rest of the choice."""
        choice = self._choice(index, self.decoder.end())
        return replace(choice, finish=self.decoder.finish_reason(sequence.stop_reason))

    def _choice(self, index: int, delta: TextDelta) -> ChoiceDelta:
        offsets = self.decoder.offsets[self.sent :]
        ready, self.waiting = self.waiting[: len(offsets)], self.waiting[len(offsets) :]
        choice = ChoiceDelta(
            index=index,
            delta=delta,
            tokens=[token for token, _, _ in ready],
            logprobs=[logprob for _, logprob, _ in ready],
            top_logprobs=[top for _, _, top in ready],
            offsets=offsets,
            first_call=self.calls,
        )
        self.sent += len(offsets)
        self.calls += len(delta.calls)
        return choice


@dataclass(slots=True)
class StreamTotals:
    """Tokens of a stream so far, and results of its requests that are complete."""

    tokens: int = 0
    results: list[SampleResult] = field(default_factory=list)


async def choice_deltas(
    call: PreparedRequest, samples: AsyncGenerator[SampleEvent], totals: StreamTotals
) -> AsyncGenerator[ChoiceDelta]:
    """Deltas of all choices that have output, as they are sampled. They are counted in `totals`."""
    states = [_ChoiceState(call.decoder(index)) for index in range(len(call.requests) * call.body.n)]
    async with aclosing(samples):
        async for request, event in samples:
            first = request * call.body.n
            if isinstance(event, SequenceDelta):
                totals.tokens += len(event.tokens)
                deltas = [states[first + event.sample].feed(first + event.sample, event)]
            else:
                totals.results.append(event)
                sequences = enumerate(event.sequences, first)
                deltas = [states[index].end(index, sequence) for index, sequence in sequences]
            for delta in deltas:
                if _has_output(call, delta):
                    yield delta


async def event_stream(
    call: PreparedRequest,
    samples: AsyncGenerator[SampleEvent],
    kind: str,
    render: RenderChoice,
    opening: Sequence[Mapping[str, Any]],
    extra_fields: Mapping[str, Any],
) -> AsyncGenerator[str]:
    """Server-sent events with chunks of `kind`, choices rendered by `render`; ends with [DONE] in any case.

    `opening` are choices sent first, the first of them with `extra_fields` in its chunk.
    """
    no_usage = {"usage": None} if call.body.stream_options.include_usage else {}
    totals = StreamTotals()
    try:
        for choice in opening:
            yield _event({**response_head(call, kind), "choices": [choice], **no_usage, **extra_fields})
            extra_fields = {}
        async with aclosing(choice_deltas(call, samples, totals)) as deltas:
            async for delta in deltas:
                yield _event({**response_head(call, kind), "choices": [render(call, delta)], **no_usage})
        if no_usage:
            counts = usage(call, totals.results, totals.tokens)
            yield _event({**response_head(call, kind), "choices": [], "usage": counts})
    except ENDINGS:
        raise
    except BaseException as error:  # noqa: BLE001 - the client of a stream has no other answer
        yield _event(openai_error_of(as_tinsmith_error(error, f"The stream {call.id}")))
    yield "data: [DONE]\n\n"


def _has_output(call: PreparedRequest, choice: ChoiceDelta) -> bool:
    with_tokens = bool(choice.tokens) and (call.top_logprobs is not None or call.body.return_token_ids)
    return bool(choice.delta.text or choice.delta.calls or choice.finish or with_tokens)


def _event(body: dict[str, Any]) -> str:
    return f"data: {encode_json(body)}\n\n"
