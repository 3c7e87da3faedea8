"""Supervision of processes: one that is stalled is killed, and one that has ended is started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tinsmith.engine.processes.client import ServedEngine
from tinsmith.errors import TinsmithError

log = logging.getLogger(__name__)

R = TypeVar("R")

FIRST_RETRY_S = 1.0
"""Time before the second attempt to start a process; it doubles with each."""
MAX_RETRY_S = 30.0
"""Longest time between two attempts."""


async def start_until_up(
    name: str,
    start: Callable[[], Awaitable[R]],
    on_failure: Callable[[int, Exception], Awaitable[None]] | None = None,
    *,
    errors: tuple[type[Exception], ...] = (TinsmithError, OSError),
) -> R:
    """Start a process as often as it takes, with growing delays.

    `on_failure` is awaited after each attempt that failed, with the number of these and the error. `errors`: after
    which another attempt may succeed; any other is raised.
    """
    delay, failed = FIRST_RETRY_S, 0
    while True:
        try:
            return await start()
        except errors as error:
            failed += 1
            log.exception("%s does not start; next attempt in %.0f s.", name, delay)
            if on_failure is not None:
                await on_failure(failed, error)
        await asyncio.sleep(delay)
        delay = min(2 * delay, MAX_RETRY_S)


async def keep_running(
    name: str,
    end: Callable[[], Awaitable[str]],
    start: Callable[[], Awaitable[None]],
    on_failure: Callable[[int, Exception], Awaitable[None]] | None = None,
) -> None:
    """Forever: wait for the end of a process, and start it again.

    `end` waits until the process that runs has ended and nothing is left of it, and returns the reason. `start` and
    `on_failure` are those of `start_until_up`.
    """
    while True:
        log.warning("%s ended (%s); it is started again.", name, await end())
        await start_until_up(name, start, on_failure)


async def kill_when_stalled(engine: ServedEngine, timeout_s: float, name: str) -> None:
    """Wait until an engine's processes are stalled, then log why and kill them."""
    end = await engine.stalled(timeout_s)
    log.error(
        "%s (process %d) is killed (%s). It was running: %s.",
        *(name, engine.pid, end.text, engine.running() or "nothing"),
    )
    engine.kill(end)


async def wait_for_end(engine: ServedEngine, timeout_s: float, name: str) -> str:
    """Wait until an engine's processes have ended, which are killed if they are stalled; returns the reason."""
    watch = asyncio.create_task(kill_when_stalled(engine, timeout_s, name))
    try:
        await engine.died.wait()
    finally:
        watch.cancel()
    return engine.end.text if engine.end is not None else "the reason is unknown"
