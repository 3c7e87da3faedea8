"""The end of a session by the SDK, and what its client was doing where that takes too long.

`ServiceClient.close()` ends the session, cancels the SDK's tasks and waits for them. `asyncio.wait_for` of Python 3.11
loses a cancellation that arrives as what it waits for has come; the task then goes on, and `close()` never returns.
Python 3.12 loses none. The SDK waits in this way for the responses to heartbeats and to telemetry (in
pyqwest), and for the event that lets it send telemetry, which `close()` sets just before it cancels: if telemetry is
under way then, as while the service is away, and the loop is late, as on busy cores, that cancellation is lost.
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from tinker.lib.internal_client_holder import InternalClientHolder
from tinker.lib.internal_client_holder import _internal_client_holder_thread_singleton as client_thread

CHECK_S = 15.0
"""Time between two looks at a session that is ending. A task that was cancelled before one and still runs at the next
has lost its cancellation."""


def wait_until_closed(
    closed: Future[None], holder: InternalClientHolder, is_ended: Callable[[], bool], limit_s: float, check_s: float
) -> int:
    """Wait for the end of `ServiceClient.close()`. Returns how many cancellations Python had lost.

    They are repeated, once the service counts the session as ended: if nothing else holds `close()` up, that ends it.
    Raises FutureTimeoutError after `limit_s`. `check_s`: time between two looks.
    """
    end, lost = time.monotonic() + limit_s, 0
    before: set[asyncio.Task[Any]] = set()
    while (left := end - time.monotonic()) > 0:
        if wait([closed], min(check_s, left)).done:
            closed.result()
            return lost
        now = _cancelled_tasks(holder)
        going_on = now & before
        if going_on and is_ended():
            for task in going_on:
                task.get_loop().call_soon_threadsafe(task.cancel)
            lost += len(going_on)
            now = set()
        before = now
    raise FutureTimeoutError


def _cancelled_tasks(holder: InternalClientHolder) -> set[asyncio.Task[Any]]:
    """The tasks of a client that were cancelled and run."""
    telemetry = holder.get_telemetry()
    tasks = [
        holder._session_heartbeat_task,
        holder._client_dynamic_config_refresh_task,
        holder._cancel_drain_task,
        telemetry._task if telemetry is not None else None,
        *holder._futures_poller_tasks,
    ]
    return {task for task in tasks if task is not None and task.cancelling() > 0 and not task.done()}


def stacks() -> list[str]:
    """Stacks of all threads of this process and of all tasks of the SDK, outermost frame first, as lines."""
    lines = []
    for thread, frame in sys._current_frames().items():
        lines += [f"thread {thread}:", *("".join(traceback.format_stack(frame)).splitlines())]
    loop = client_thread.loop_if_started()
    for task in asyncio.all_tasks(loop) if loop is not None else ():
        lines += [f"{task.get_name()}, cancelled {task.cancelling()} times:", *awaits(task)]
    return lines


def awaits(task: asyncio.Task[Any]) -> Iterable[str]:
    """The functions of a task that wait for each other."""
    waiting: Any = task.get_coro()
    while waiting is not None:
        kind = next((kind for kind in ("cr", "ag", "gi") if hasattr(waiting, f"{kind}_frame")), None)
        frame = getattr(waiting, f"{kind}_frame") if kind else None
        if frame is None:
            return
        yield f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
