"""Threads for work on large bodies, so that the event loop stays responsive; tasks that end together, and loops that
survive a bug.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar

log = logging.getLogger(__name__)

LARGE_BYTES = 64 * 2**10
"""Bytes from which decoding a body takes longer than the way to a thread or a process and back."""

RESTART_DELAY_S = 1

P = ParamSpec("P")
R = TypeVar("R")


async def run_in_thread_if_large(size: int, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """Return the function's result. It runs in a thread if `size` bytes are more than LARGE_BYTES."""
    if size > LARGE_BYTES:
        return await asyncio.to_thread(function, *args, **options)
    return function(*args, **options)


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """The results of all coroutines. If one fails, or the caller is cancelled, the others are cancelled first."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def restart_on_error(run: Callable[[], Awaitable[None]]) -> None:
    """Run a loop again after a bug has ended it: other requests must not wait for a restart of the server."""
    while True:
        try:
            await run()
        except Exception:
            log.exception("A loop of the service failed; restarting it.")
            await asyncio.sleep(RESTART_DELAY_S)
