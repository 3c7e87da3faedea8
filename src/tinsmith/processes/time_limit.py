"""A time limit for code that cannot be trusted to end, by a signal that interrupts it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class _TimeIsUp(BaseException):
    """Not an Exception, because libraries catch those."""


def call_with_limit(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    seconds: float | None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """The result of the function. Raises TimeoutError after `seconds`; None is no limit.

    A long operation of a C library is not interrupted. Outside the main thread there is no time limit, because only the
    main thread receives signals.
    """
    options = options or {}
    if seconds is None or threading.current_thread() is not threading.main_thread():
        return function(*arguments, **options)
    previous = signal.signal(signal.SIGALRM, _interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            return function(*arguments, **options)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TimeIsUp:
        raise TimeoutError from None
    finally:
        signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)


def _interrupt(*_: object) -> None:
    raise _TimeIsUp
