"""An event loop that user code cannot stop, and that ends although user code goes on.

Where an event loop runs already, as in a cell of a notebook or in an async function, the work gets a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from tinsmith.errors import UserError
from tinsmith.plurals import counted
from tinsmith.rl.guards.user_code import Interrupted

CLOSE_SECONDS = 5.0
"""How long tasks may take to end after the work is done."""
INTERRUPT_SECONDS = 3.0
"""How long interrupted work in a thread of its own may take to end; less than END_SECONDS of ending/stop.py."""
THREADS_SECONDS = 10.0
"""How long the process waits for threads of user code at its end."""

log = logging.getLogger(__name__)
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, as asyncio.run; the caller waits for it, also in a thread that runs an event loop.

    A task of user code that calls sys.exit(), raises KeyboardInterrupt or stops the event loop does not end the work.
    Tasks that ignore their cancellation are left after CLOSE_SECONDS.
    """
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(thread_name_prefix=_threads_of(loop)))
    task = loop.create_task(work)
    return _run_in_thread(loop, task) if _a_loop_runs_here() else _run(loop, task)


def _a_loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_in_thread(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    """The result of the task, from a thread of its own. If the wait is interrupted, the task is cancelled."""
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(_run(loop, task))
        except BaseException as error:  # noqa: BLE001  raised again where the work is awaited
            outcome.set_exception(error)

    thread = threading.Thread(target=work, name="run", daemon=True)
    try:
        thread.start()
        return outcome.result()
    except KeyboardInterrupt:
        with suppress(RuntimeError):  # the loop is closed: the work has ended
            loop.call_soon_threadsafe(task.cancel)
        thread.join(INTERRUPT_SECONDS)
        if thread.is_alive():
            log.warning("The interrupted run still ends, in the background")
        raise


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    asyncio.set_event_loop(loop)
    succeeded = False
    try:
        _run_until_done(loop, task)
        result = task.result()
        succeeded = True
        return result
    finally:
        try:
            _close(loop, task)
        finally:
            asyncio.set_event_loop(None)
            _leave_threads(loop, 0 if succeeded else 1)


def _run_until_done(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    """Run the loop until the task is done, however often user code stops it. Each round runs a turn of the loop.

    Raises Interrupted, and UserError if user code closes the loop.
    """

    def stop(done: asyncio.Task[Any]) -> None:
        if done.cancelled() or not isinstance(done.exception(), SystemExit | KeyboardInterrupt):
            loop.stop()  # by these exceptions, the loop has stopped already

    task.add_done_callback(stop)
    try:
        _run_rounds(loop, task)
    finally:
        task.remove_done_callback(stop)


def _run_rounds(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    rounds = 0
    while not task.done():
        if loop.is_closed():
            raise UserError("User code closed the event loop of the run.", "Remove its call of the loop's close().")
        reason = "it stopped the event loop"
        try:
            loop.run_forever()
        except Interrupted:
            raise
        except (SystemExit, KeyboardInterrupt) as error:
            reason = f"{type(error).__name__}: {error}"
        rounds += 1
        if not task.done() and rounds & (rounds - 1) == 0:  # the first, and then ever fewer
            log.error("User code tried to end the run (%s), %s so far; it goes on", reason, counted(rounds, "time"))


def _close(loop: asyncio.AbstractEventLoop, work: asyncio.Task[Any]) -> None:
    if loop.is_closed():
        return
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        _run_until_done(loop, loop.create_task(_wait(tasks)))
    for task in tasks:
        if task.done() and not task.cancelled() and task is not work and (error := task.exception()) is not None:
            log.warning("A task failed at the end of the run: %s: %s", type(error).__name__, error)
    _run_until_done(loop, loop.create_task(loop.shutdown_asyncgens()))
    if remaining := sum(not task.done() for task in tasks):
        log.warning(
            "User code goes on in %s after its cancellation; the run ends without it", counted(remaining, "task")
        )
        loop.set_exception_handler(_ignore)
    loop.close()


async def _wait(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks, timeout=CLOSE_SECONDS)


def _ignore(_loop: asyncio.AbstractEventLoop, _context: dict[str, Any]) -> None:
    """For errors of a closed loop: its remaining tasks were reported, and asyncio would report each of them again."""


def _threads_of(loop: asyncio.AbstractEventLoop) -> str:
    """How the names of the threads of the loop's executor begin."""
    return f"run-{id(loop):x}-"


def _leave_threads(loop: asyncio.AbstractEventLoop, code: int) -> None:
    """End the process without the threads that user code still runs in the loop's executor, which Python would join."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(_threads_of(loop))]
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
