"""An event loop that user code cannot stop, and that ends although user code goes on."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from tinsmith.plurals import counted
from tinsmith.rl.guards.user_code import Interrupted

CLOSE_SECONDS = 5.0
"""How long tasks may take to end after the work is done."""
THREADS_SECONDS = 10.0
"""How long the process waits for threads of user code at its end."""

log = logging.getLogger(__name__)
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, as asyncio.run.

    A task of user code that calls sys.exit(), raises KeyboardInterrupt or stops the event loop does not end the work.
    Tasks that ignore their cancellation are left after CLOSE_SECONDS.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    task = loop.create_task(work)
    succeeded = False
    try:
        while True:
            try:
                result = loop.run_until_complete(task)
                succeeded = True
                return result
            except (SystemExit, KeyboardInterrupt, RuntimeError) as error:
                if task.done() or isinstance(error, Interrupted):
                    raise
                log.error("User code tried to end the run (%s: %s); the run goes on", type(error).__name__, error)
    finally:
        try:
            _close(loop, task)
        finally:
            asyncio.set_event_loop(None)
            _leave_threads(loop, 0 if succeeded else 1)


def _close(loop: asyncio.AbstractEventLoop, work: asyncio.Task[Any]) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_SECONDS))
    for task in tasks:
        if task.done() and not task.cancelled() and task is not work and (error := task.exception()) is not None:
            log.warning("A task failed at the end of the run: %s: %s", type(error).__name__, error)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _leave_threads(loop: asyncio.AbstractEventLoop, code: int) -> None:
    """End the process without the threads that user code still runs in the loop's executor, which Python would join."""
    executor = vars(loop).get("_default_executor")
    threads = [thread for thread in executor._threads if thread.is_alive()] if executor is not None else []
    deadline = time.monotonic() + 1.0
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if not any(thread.is_alive() for thread in threads):
        return
    log.warning("User code still runs in %s; the process ends without it", counted(len(threads), "thread"))

    def end() -> None:
        threading.main_thread().join()
        time.sleep(THREADS_SECONDS)
        os._exit(code)

    threading.Thread(target=end, name="end", daemon=True).start()
