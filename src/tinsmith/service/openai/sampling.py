"""Sample for a client that waits on the connection, and decode tokens to text and tool calls while they arrive.

A client that disconnects stops the engine's work. A sample that is lost with its engine before any of it was sent is
sampled again by the next engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from starlette.requests import Request

from tinsmith.chat.tokenizer import Detokenizer
from tinsmith.chat.tool_calls import ToolCall, ToolCallParser, partial_match
from tinsmith.engine.base import OnDelta, SampleRequest, SampleResult, SequenceDelta
from tinsmith.errors import EngineDied, Gone
from tinsmith.service.sampling import Sampling

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text and tool calls of a choice."""

    text: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(slots=True, kw_only=True)
class ChoiceDecoder:
    """Decodes one choice incrementally: tokens in, text and tool calls that are final out.

    Incomplete characters, possible beginnings of a stop string and possible tool calls are held back. `stops` end the
    text; `include_stop` keeps the stop string in it.
    """

    detokenizer: Detokenizer
    stops: Sequence[str] = ()
    include_stop: bool = False
    parser: ToolCallParser | None = None
    stopped: bool = False
    calls: int = 0
    _held: str = field(default="")

    def feed(self, tokens: Iterable[int]) -> TextDelta:
        """Add tokens."""
        return self._parse(self._cut(self.detokenizer.feed(tokens)))

    def end(self) -> TextDelta:
        """The remaining text and calls after the last token."""
        text = self._cut(self.detokenizer.end()) + self._held
        self._held = ""
        delta = self._parse(text)
        if self.parser is None:
            return delta
        rest, calls = self.parser.end()
        self.calls += len(calls)
        return TextDelta(text=delta.text + rest, calls=(*delta.calls, *calls))

    def finish_reason(self, stop_reason: Literal["stop", "length"]) -> FinishReason:
        """The choice's finish reason, after `end`."""
        reason = "stop" if self.stopped else stop_reason
        return "tool_calls" if self.calls and reason == "stop" else reason

    def _cut(self, text: str) -> str:
        """Text up to a stop string; the possible beginning of one is held back."""
        if self.stopped:
            return ""
        self._held += text
        matches = [(at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if matches:
            at, stop = min(matches)
            self.stopped = True
            text, self._held = self._held[: at + len(stop) * self.include_stop], ""
            return text
        cut = len(self._held) - partial_match(self._held, self.stops)
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _parse(self, text: str) -> TextDelta:
        if self.parser is None:
            return TextDelta(text=text)
        text, calls = self.parser.feed(text)
        self.calls += len(calls)
        return TextDelta(text=text, calls=tuple(calls))


ATTEMPTS = 3
_DRAINING = Gone("The server is shutting down.", "Retry when it is back.")

T = TypeVar("T")
SampleEvent = tuple[int, SequenceDelta | SampleResult]
"""(index of the request, a delta of one of its sequences; at the end the whole result)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCalls:
    """Requests of one tenant to one base model."""

    owner: str
    base_model: str
    requests: Sequence[SampleRequest]


async def sample_all(http: Request, sampling: Sampling, calls: SampleCalls) -> list[SampleResult]:
    """The result of each request, once all are complete.

    Raises Gone when the client disconnects, Busy for a tenant over its quota.
    """
    tasks = [asyncio.create_task(_sample(sampling, calls, request)) for request in calls.requests]
    try:
        return await _unless_disconnected(http, asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def stream_samples(http: Request, sampling: Sampling, calls: SampleCalls) -> AsyncGenerator[SampleEvent]:
    """Events of all requests as they arrive. The first is awaited here, so errors before it raise as in `sample_all`.

    Closing the generator stops the engine's work.
    """
    events = _events(sampling, calls)
    first = await _unless_disconnected(http, anext(events))
    return _chain(first, events)


async def _chain(first: SampleEvent, events: AsyncGenerator[SampleEvent]) -> AsyncGenerator[SampleEvent]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


async def _events(sampling: Sampling, calls: SampleCalls) -> AsyncGenerator[SampleEvent]:
    queue: asyncio.Queue[tuple[int, SequenceDelta | asyncio.Task[SampleResult]]] = asyncio.Queue()

    def listener(index: int) -> OnDelta:
        return lambda delta: queue.put_nowait((index, delta))

    tasks = [
        asyncio.create_task(_sample(sampling, calls, request, listener(index)))
        for index, request in enumerate(calls.requests)
    ]
    for index, task in enumerate(tasks):
        task.add_done_callback(lambda done, index=index: queue.put_nowait((index, done)))
    try:
        remaining = len(tasks)
        while remaining:
            index, event = await queue.get()
            if isinstance(event, SequenceDelta):
                yield index, event
                continue
            if event.cancelled():
                raise _DRAINING
            remaining -= 1
            yield index, event.result()
    finally:
        for task in tasks:
            task.cancel()


async def _sample(
    sampling: Sampling, calls: SampleCalls, request: SampleRequest, on_delta: OnDelta | None = None
) -> SampleResult:
    """Sample; a request whose engine died is retried unless one of its deltas was sent."""
    has_sent = False

    def send(delta: SequenceDelta) -> None:
        nonlocal has_sent
        has_sent = True
        if on_delta is not None:
            on_delta(delta)

    for remaining in reversed(range(ATTEMPTS)):
        try:
            return await sampling.start(calls.owner, calls.base_model, request, send if on_delta else None)
        except EngineDied:
            if has_sent or not remaining:
                raise
    raise AssertionError("the last attempt returns or raises")


async def _unless_disconnected(http: Request, work: Awaitable[T]) -> T:
    task, disconnected = asyncio.ensure_future(work), asyncio.create_task(_disconnected(http))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # a cancelled gather ends with an error
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone("The client has disconnected.")
        if task.cancelled():
            raise _DRAINING
        return task.result()
    finally:
        disconnected.cancel()
        task.cancel()


async def _disconnected(http: Request) -> None:
    """Return when the client disconnects; the request's body has been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
