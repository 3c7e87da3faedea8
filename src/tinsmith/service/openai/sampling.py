"""Sample for a client that waits on the connection.

A client that disconnects stops the engine's work. A sample that is lost with its engine before any of it was sent is
sampled again by the next engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from tinsmith.engine.base import OnDelta, SampleRequest, SampleResult, SequenceDelta
from tinsmith.errors import EngineDied, Gone
from tinsmith.service.sampling import Sampling

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
        task = sampling.start(calls.owner, calls.base_model, request, send if on_delta else None)
        try:
            return await task
        except EngineDied:
            if has_sent or not remaining:
                raise
        except asyncio.CancelledError as cancelled:
            if cancelled.args and task.cancelled():  # by Sampling.cancel, which says so
                raise Gone(str(cancelled.args[0])) from None
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
