"""Samples whose client waits on the same connection: as they grow, or whole. Who goes away stops the engine's work.

A sample that was lost with its engine, before anything of it was told, is drawn again by the next engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from tinsmith.engine.base import Heard, Piece, Sampled, SampleRequest
from tinsmith.errors import EngineDied, Gone
from tinsmith.service.sampling import Sampling

TRIES = 3
_ENDING = Gone("The server is ending.", "Ask again when it is back.")

T = TypeVar("T")
New = tuple[int, Piece | Sampled]
"""Which request, and what is new of it; at last all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Requests of one tenant to one base model."""

    owner: str
    base_model: str
    requests: Sequence[SampleRequest]


async def whole(http: Request, sampling: Sampling, calls: Calls) -> list[Sampled]:
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
    queue: asyncio.Queue[tuple[int, Piece | asyncio.Task[Sampled]]] = asyncio.Queue()

    def listening(index: int) -> Heard:
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
            if isinstance(new, Piece):
                yield index, new
                continue
            if new.cancelled():
                raise _ENDING
            left -= 1
            yield index, new.result()
    finally:
        for task in tasks:
            task.cancel()


async def _sampled(sampling: Sampling, calls: Calls, request: SampleRequest, heard: Heard | None = None) -> Sampled:
    told = False

    def hear(piece: Piece) -> None:
        nonlocal told
        told = True
        if heard is not None:
            heard(piece)

    for left in reversed(range(TRIES)):
        try:
            return await sampling.begin(calls.owner, calls.base_model, request, hear if heard else None)
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
