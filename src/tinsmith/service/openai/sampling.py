"""One choice of an answer as it grows: tokens in; out comes text that will not be taken back, and tool calls.

Held back are half characters, what may be the beginning of a stop string, and what may be a tool call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from starlette.requests import Request

from tinsmith.chat.tokenizer import Growing
from tinsmith.chat.tool_calls import Call, Reading, held_back
from tinsmith.engine.base import OnDelta, SampleRequest, SampleResult, SequenceDelta
from tinsmith.errors import EngineDied, Gone
from tinsmith.service.sampling import Sampling

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """What a choice has grown by."""

    text: str
    calls: tuple[Call, ...] = ()


@dataclass(slots=True, kw_only=True)
class Choice:
    """`stops` end the text, and are in it only if `stops_stay`."""

    growing: Growing
    stops: Sequence[str] = ()
    stops_stay: bool = False
    reading: Reading | None = None
    stopped: bool = False
    calls: int = 0
    _held: str = field(default="")

    def feed(self, tokens: Iterable[int]) -> Grown:
        """The next tokens."""
        return self._read(self._cut(self.growing.feed(tokens)))

    def end(self) -> Grown:
        """No more tokens will come."""
        text = self._cut(self.growing.end()) + self._held
        self._held = ""
        first = self._read(text)
        if self.reading is None:
            return first
        rest, calls = self.reading.end()
        self.calls += len(calls)
        return Grown(text=first.text + rest, calls=(*first.calls, *calls))

    def finish(self, stop_reason: Literal["stop", "length"]) -> Finish:
        """Why it ended, once it has."""
        reason = "stop" if self.stopped else stop_reason
        return "tool_calls" if self.calls and reason == "stop" else reason

    def _cut(self, text: str) -> str:
        """Text up to a stop string; its possible beginning is held."""
        if self.stopped:
            return ""
        self._held += text
        places = [(at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if places:
            at, stop = min(places)
            self.stopped = True
            text, self._held = self._held[: at + len(stop) * self.stops_stay], ""
            return text
        keep = held_back(self._held, self.stops)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def _read(self, text: str) -> Grown:
        if self.reading is None:
            return Grown(text=text)
        said, calls = self.reading.feed(text)
        self.calls += len(calls)
        return Grown(text=said, calls=tuple(calls))


TRIES = 3
_ENDING = Gone("The server is ending.", "Ask again when it is back.")

T = TypeVar("T")
New = tuple[int, SequenceDelta | SampleResult]
"""Which request, and what is new of it; at last all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Requests of one tenant to one base model."""

    owner: str
    base_model: str
    requests: Sequence[SampleRequest]


async def whole(http: Request, sampling: Sampling, calls: Calls) -> list[SampleResult]:
    """Every answer, once all are complete. Raises Gone when the client has gone, Busy for a tenant over its quota."""
    tasks = [asyncio.create_task(_sampled(sampling, calls, request)) for request in calls.requests]
    try:
        return await _unless_gone(http, asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def begun(http: Request, sampling: Sampling, calls: Calls) -> AsyncGenerator[New]:
    """As it comes, from the first piece on, which is awaited here: what fails before it is raised as by `whole`.

    Closing the generator stops the work.
    """
    growing = _growing(sampling, calls)
    first = await _unless_gone(http, anext(growing))
    return _from(first, growing)


async def _from(first: New, others: AsyncGenerator[New]) -> AsyncGenerator[New]:
    async with aclosing(others):
        yield first
        async for new in others:
            yield new


async def _growing(sampling: Sampling, calls: Calls) -> AsyncGenerator[New]:
    queue: asyncio.Queue[tuple[int, SequenceDelta | asyncio.Task[SampleResult]]] = asyncio.Queue()

    def listening(index: int) -> OnDelta:
        return lambda piece: queue.put_nowait((index, piece))

    tasks = [
        asyncio.create_task(_sampled(sampling, calls, request, listening(index)))
        for index, request in enumerate(calls.requests)
    ]
    for index, task in enumerate(tasks):
        task.add_done_callback(lambda done, index=index: queue.put_nowait((index, done)))
    try:
        left = len(tasks)
        while left:
            index, new = await queue.get()
            if isinstance(new, SequenceDelta):
                yield index, new
                continue
            if new.cancelled():
                raise _ENDING
            left -= 1
            yield index, new.result()
    finally:
        for task in tasks:
            task.cancel()


async def _sampled(
    sampling: Sampling, calls: Calls, request: SampleRequest, on_delta: OnDelta | None = None
) -> SampleResult:
    told = False

    def hear(piece: SequenceDelta) -> None:
        nonlocal told
        told = True
        if on_delta is not None:
            on_delta(piece)

    for left in reversed(range(TRIES)):
        try:
            return await sampling.start(calls.owner, calls.base_model, request, hear if on_delta else None)
        except EngineDied:
            if told or not left:
                raise
    raise AssertionError("the last try returns or raises")


async def _unless_gone(http: Request, work: Awaitable[T]) -> T:
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_gone(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone("The client has gone.")
        if task.cancelled():
            raise _ENDING
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _gone(http: Request) -> None:
    """Returns when the client hangs up; its body has been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
