"""A watchdog for the event loop of a run: user code that blocks it is logged with its stack, and interrupted.

While code blocks the event loop, no rollout, no timeout and no request of the run makes progress. A thread looks at the
time of the loop's last turn. After `WARN_SECONDS` it logs where the code is; after `limit` seconds the code is
interrupted by an exception, which fails its rollout. A call into a C library is interrupted when it returns.

The watchdog also restores the working directory and, for a run that stops at SIGINT and SIGTERM, what these do, if user
code changed them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from tinsmith.rl.guards.user_code import Blocked, is_user_code

WARN_SECONDS = 10.0
"""Time without a turn of the event loop after which a warning is logged."""
_TICK_SECONDS = 0.5
_LINES = 12
"""Innermost lines of the stack that are logged."""
_SIGNAL = signal.SIGUSR2

log = logging.getLogger(__name__)


@contextmanager
def watch_event_loop(limit: float, *, keep_signals: bool = True) -> Iterator[None]:
    """Watch the running event loop during a block; interrupt user code that blocks it for `limit` seconds.

    Outside of the main thread, code is not interrupted. Without `keep_signals`, the block may change what SIGINT and
    SIGTERM do, as a notebook does with each cell.
    """
    watchdog = _Watchdog(asyncio.get_running_loop(), limit, min(WARN_SECONDS, limit), keep_signals)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


class _Watchdog:
    def __init__(self, loop: asyncio.AbstractEventLoop, limit: float, warn: float, keep_signals: bool) -> None:
        self._loop, self._limit, self._warn = loop, limit, warn
        self._owner = threading.get_ident()
        self._in_main = threading.current_thread() is threading.main_thread()
        self._turn = time.monotonic()
        self._warned = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="event-loop-watchdog", daemon=True)
        self._folder = os.getcwd()
        numbers = (signal.SIGINT, signal.SIGTERM) if keep_signals and self._in_main else ()
        self._actions = {number: signal.getsignal(number) for number in numbers}

    def start(self) -> None:
        if self._in_main:
            self._previous = signal.signal(_SIGNAL, self._interrupt)
        self._tick()
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._timer.cancel()
        self._thread.join()
        self._restore()
        if self._in_main:
            signal.signal(_SIGNAL, self._previous or signal.SIG_DFL)

    def _tick(self) -> None:
        """Note a turn of the event loop."""
        self._turn = time.monotonic()
        self._restore()
        self._timer = self._loop.call_later(min(_TICK_SECONDS, self._warn / 2), self._tick)

    def _restore(self) -> None:
        folder = ""
        with suppress(OSError):
            folder = os.getcwd()
        if folder != self._folder:
            log.warning("User code changed the working directory to %s; it is %s again", folder, self._folder)
            os.chdir(self._folder)
        for number, action in self._actions.items():
            if signal.getsignal(number) is not action:
                log.warning("User code changed what %s does; it is restored", signal.Signals(number).name)
                signal.signal(number, action)

    def _watch(self) -> None:
        while not self._ended.wait(min(_TICK_SECONDS, self._warn / 2)):
            seconds = time.monotonic() - self._turn
            if seconds < self._warn:
                self._warned = False
                continue
            if not self._warned:
                self._warned = True
                log.warning("The event loop has been blocked for %.3g seconds, at:\n%s", seconds, self._stack())
            if self._in_main and seconds >= self._limit:
                signal.pthread_kill(self._owner, _SIGNAL)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._owner)
        return "".join(traceback.format_stack(frame)[-_LINES:]).rstrip()

    def _interrupt(self, _number: int, frame: FrameType | None) -> None:
        """Raise Blocked in the main thread if it is in user code, and still blocked."""
        seconds = time.monotonic() - self._turn
        if seconds >= self._limit and is_user_code(frame):
            raise Blocked(f"it kept the event loop from running for {seconds:.3g} seconds (rollout.max_blocking)")
