"""Ends a process with its parent, in whatever way the parent ends. Imports the standard library only.

On Linux the system kills the process when the thread that forked it ends. Elsewhere, and where the parent ended before
that was arranged, a thread of the process sees another parent, or the end of a pipe that the parent holds open.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

POLL_S = 0.2
_PR_SET_PDEATHSIG = 1


def end_with_forking_thread() -> None:
    """Have the system kill this process when the thread that forked it ends, on Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def watch_parent(end: Callable[[], None], descriptor: int | None = None) -> None:
    """Call `end` in a thread once the parent has ended, or has closed the other end of a descriptor.

    A parent that ended before this call is noticed by its descriptor only.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and not (descriptor is not None and is_closed(descriptor)):
            time.sleep(POLL_S)
        end()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def is_closed(descriptor: int) -> bool:
    """Whether the other end of a pipe is closed; what was written before may still be read."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))
