"""Exceptions of user code: which of them fail a rollout, and how they are described.

User code may raise anything, also SystemExit, KeyboardInterrupt and asyncio.CancelledError; none of it ends a run.
"""

from __future__ import annotations

import asyncio
import sysconfig
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any, TypeVar

from tinsmith.chat.strict_json import encodable
from tinsmith.errors import TinsmithError

MAX_LENGTH = 2000
"""Characters of the description of an error."""
GRACE_SECONDS = 5.0
"""How long code that was cancelled may go on before it is left to itself."""

_OTHERS = (
    str(Path(__file__).parents[2]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen ",
)
"""Folders of code that is not the user's: Tinsmith, Python and installed packages."""

T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """The second Ctrl-C: the run ends at once."""


class Blocked(BaseException):
    """User code blocked the event loop for too long. Not an Exception, because user code catches those."""


class Exited(Exception):
    """User code raised SystemExit or KeyboardInterrupt."""


class Stuck(Exception):
    """User code goes on after it was cancelled."""


def is_fault(error: BaseException) -> bool:
    """Whether user code caused the exception: not a cancellation of the current task from outside, and not Ctrl-C."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and not task.cancelling()
    return not isinstance(error, Interrupted | GeneratorExit)


async def contained(work: Awaitable[T], failed: Callable[[BaseException], T]) -> T:
    """The result of awaiting `work`, or what `failed` makes of an exception that user code caused."""
    try:
        return await work
    except BaseException as error:
        if not is_fault(error):
            raise
        return failed(error)


def describe(error: BaseException) -> str:
    """The type and message of an exception, cut to MAX_LENGTH, and the line of user code that raised it.

    Of an error of Tinsmith it is the message.
    """
    explained = isinstance(error, Exited | TinsmithError)
    try:
        text = str(error) if explained else f"{type(error).__name__}: {error}"
    except Exception as failure:  # noqa: BLE001  user code: its __str__ may raise anything
        text = f"{type(error).__name__}, whose message raises {type(failure).__name__}"
    text = encodable(text)
    text = text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]}… ({len(text)} characters)"
    place = "" if explained else _place(error.__traceback__)
    return f"{text} ({place})" if place else text


def _place(trace: TracebackType | None) -> str:
    """FOLDER/FILE:LINE of the innermost line of user code; empty if there is none."""
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(trace)]
    own = [f"{'/'.join(Path(file).parts[-2:])}:{line}" for file, line in lines if not file.startswith(_OTHERS)]
    return own[-1] if own else ""


async def run_user_code(work: Awaitable[T]) -> T:
    """The result of awaiting user code, which may be interrupted if it blocks the event loop.

    Raises Exited for sys.exit() and KeyboardInterrupt, which would end the event loop if they left their task.
    """
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, Interrupted):
            raise
        raise Exited(describe(error)) from error


def is_user_code(frame: FrameType | None) -> bool:
    """Whether a frame runs inside of `run_user_code`."""
    while frame is not None:
        if frame.f_code is run_user_code.__code__:
            return True
        frame = frame.f_back
    return False


async def bounded(work: Coroutine[Any, Any, T], expired: Callable[[], bool]) -> T:
    """The result of `work`, whose own time limit `expired` reports. Raises Stuck if it goes on after its cancellation.

    Work that is left to itself may hold memory, but nothing waits for it.
    """
    task = asyncio.create_task(work)
    late = False
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=GRACE_SECONDS)
            if late and not task.done():
                raise Stuck
            late = expired()
        return task.result()
    finally:
        if not task.done():
            task.add_done_callback(_forget)
            task.cancel()
            if not late:
                await asyncio.wait({task}, timeout=GRACE_SECONDS)


def _forget(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception of a task that nothing waits for, so that it is not reported as lost."""
    if not task.cancelled():
        task.exception()
