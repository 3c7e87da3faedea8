"""The Responses API, `/v1/responses`: a request is translated to a chat completion, and nothing of it is stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, ValidationError

from tinsmith.chat.errors import ENDINGS, as_tinsmith_error
from tinsmith.chat.strict_json import encode_json
from tinsmith.engine.base import SampleResult
from tinsmith.errors import BadRequest, UserError
from tinsmith.service.openai.requests import PreparedRequest, new_id
from tinsmith.service.openai.response_items import call_item, chat_messages, chat_tools, message_item, text_part
from tinsmith.service.openai.responses import ChoiceDelta, StreamTotals, choice_deltas, sampled_tokens, whole_choice
from tinsmith.service.openai.sampling import SampleEvent
from tinsmith.service.openai.schemas import ChatBody, Name
from tinsmith.service.wire.schemas import WireModel, invalid_body

_RESPONSES_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}
"""Field of chat completions -> field of the Responses API."""


class ResponsesBody(WireModel):
    """responses."""

    model: Name
    input: str | list[Any]
    instructions: str | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list, max_length=1024)
    tool_choice: Any = "auto"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(-1, ge=-1)
    seed: int | None = None
    max_output_tokens: int | None = None
    stream: bool = False

    def to_chat(self) -> ChatBody:
        """The request as a chat completion. Raises BadRequest or Unsupported."""
        messages, tools = chat_messages(self.instructions, self.input), chat_tools(self.tools)
        if not messages:
            raise BadRequest("input is an empty conversation.", "Send at least one message.", field="input")
        try:
            return ChatBody(
                n=1,
                top_logprobs=0,
                model=self.model,
                messages=messages,
                tools=tools,
                tool_choice=self.tool_choice,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                seed=self.seed,
                max_completion_tokens=self.max_output_tokens,
                stream=self.stream,
            )
        except ValidationError as error:
            raise invalid_body(error, _RESPONSES_FIELDS) from error


@contextmanager
def naming_fields() -> Iterator[None]:
    """Errors that are raised in the block name fields of the Responses API in place of those of chat completions."""
    try:
        yield
    except UserError as error:
        named = error.field or ""
        if named.startswith("messages"):
            error.field = "input"
        else:
            error.field = _RESPONSES_FIELDS.get(named, error.field)
        raise


def whole_response(body: ResponsesBody, call: PreparedRequest, sampled: SampleResult) -> dict[str, Any]:
    """The response to a request that is not streamed."""
    choice = whole_choice(call, 0, sampled.sequences[0])
    items = [call_item(made) for made in choice.delta.calls]
    if choice.delta.text or not items:
        items.insert(0, message_item(new_id("msg"), choice.delta.text, _item_status(choice)))
    return _response(body, call, items, choice, _usage(call, [sampled], sampled_tokens([sampled])))


def _item_status(choice: ChoiceDelta) -> str:
    return "incomplete" if choice.finish == "length" else "completed"


def _response(
    body: ResponsesBody,
    call: PreparedRequest,
    output: Sequence[dict[str, Any]],
    choice: ChoiceDelta | None,
    usage: dict[str, Any] | None,
) -> dict[str, Any]:
    """A response object; without its last choice, it is in progress."""
    is_cut = choice is not None and choice.finish == "length"
    return {
        "id": call.id,
        "object": "response",
        "created_at": call.created,
        "status": "in_progress" if choice is None else _item_status(choice),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": {},
        "model": body.model,
        "system_fingerprint": call.model.weights,
        "output": list(output),
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice,
        "tools": body.tools,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": usage,
    }


def _usage(call: PreparedRequest, sampled: Sequence[SampleResult], output: int) -> dict[str, Any]:
    prompt = len(call.requests[0].prompt)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": sum(result.prompt_cache_hit_tokens for result in sampled)},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }


@dataclass(slots=True)
class _Events:
    """Numbers the events of a stream, and collects the items that they describe."""

    items: list[dict[str, Any]] = field(default_factory=list)
    _number: int = 0
    _message: str | None = None
    _text: str = ""

    def event(self, kind: str, **fields: Any) -> str:
        """One server-sent event."""
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {encode_json(body)}\n\n"

    def more_text(self, delta: str) -> Iterator[str]:
        """More text; the first begins a message."""
        if self._message is None:
            self._message, self._text = new_id("msg"), ""
            item = message_item(self._message, "", "in_progress")
            yield self.event("response.output_item.added", output_index=len(self.items), item=item)
            yield self.event("response.content_part.added", **self._place(), part=text_part(""))
        self._text += delta
        if delta:
            yield self.event("response.output_text.delta", **self._place(), delta=delta, logprobs=[])

    def end_text(self, status: str) -> Iterator[str]:
        """The end of the message, if one has begun."""
        if self._message is None:
            return
        item = message_item(self._message, self._text, status)
        yield self.event("response.output_text.done", **self._place(), text=self._text, logprobs=[])
        yield self.event("response.content_part.done", **self._place(), part=text_part(self._text))
        yield self.event("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._message = None

    def call(self, item: dict[str, Any]) -> Iterator[str]:
        """A function call, which is complete when it is known."""
        place = {"output_index": len(self.items), "item_id": item["id"]}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self.event("response.output_item.added", output_index=len(self.items), item=begun)
        yield self.event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield self.event("response.function_call_arguments.done", **place, **done)
        yield self.event("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self.items), "item_id": self._message, "content_index": 0}


async def response_events(
    body: ResponsesBody, call: PreparedRequest, samples: AsyncGenerator[SampleEvent]
) -> AsyncGenerator[str]:
    """Server-sent events of a response: text as it is sampled, function calls when they are complete."""
    events, totals = _Events(), StreamTotals()
    try:
        for kind in ("response.created", "response.in_progress"):
            yield events.event(kind, response=_response(body, call, [], None, None))
        async for choice in choice_deltas(call, samples, totals):
            for event in _choice_events(events, choice):
                yield event
            if choice.finish:
                usage = _usage(call, totals.results, totals.tokens)
                whole = _response(body, call, events.items, choice, usage)
                yield events.event(f"response.{whole['status']}", response=whole)
    except ENDINGS:
        raise
    except BaseException as error:  # noqa: BLE001 - the client of a stream has no other answer
        message = str(as_tinsmith_error(error, f"The stream {call.id}"))
        failed = _response(body, call, events.items, None, None)
        failed |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        yield events.event("response.failed", response=failed)


def _choice_events(events: _Events, choice: ChoiceDelta) -> Iterator[str]:
    is_empty = choice.finish and not events.items and not choice.delta.calls
    if choice.delta.text or is_empty:
        yield from events.more_text(choice.delta.text)
    for made in choice.delta.calls:
        yield from events.end_text("completed")
        yield from events.call(call_item(made))
    if choice.finish:
        yield from events.end_text(_item_status(choice))
