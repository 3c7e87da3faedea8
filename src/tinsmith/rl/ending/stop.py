"""Early stops: at its time limit, at SIGTERM or at Ctrl-C, a run saves a checkpoint from which the next run continues.

The clock is read before each step, while the run waits for a batch, and during an evaluation. Rollouts in flight have
a grace period to finish; the others are cancelled, and their tasks are sampled again after the run has resumed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from tinsmith.rl.guards.user_code import Interrupted

POLL_SECONDS = 0.2
"""Longest time between two looks at the clock."""

END_SECONDS = 5.0
"""How long the process may take to end after the second Ctrl-C."""
CTRL_C = "Ctrl-C"

T = TypeVar("T")


class StopRequested(Exception):
    """The run is to stop now; its reason is that of the StopSignal."""


class WorkCancelled(StopRequested):
    """A stop cancelled or prevented the work that was waited for."""


class StopSignal:
    """Whether a run is to stop early, and why."""

    def __init__(
        self, time_limit: float | None = None, grace: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`time_limit`: seconds from now; `grace`: seconds that work in flight has to finish."""
        self._clock, self._grace = clock, grace
        self._end = None if time_limit is None else clock() + time_limit
        self._requested_at = 0.0
        self._begun = self._interrupted = self._terminated = False
        self.watches_signals = False
        """Whether SIGTERM and Ctrl-C request a stop now."""
        self._exit: threading.Timer | None = None
        self._ending = ""
        self.reason = ""
        """Why the run stops; empty until a stop is requested."""
        self.stopped_at = ""
        """Where a run has stopped early, such as `step 7 of 80`; empty if none has."""

    def request(self, reason: str) -> None:
        """Stop as soon as possible. The first reason counts."""
        if not self.reason:
            self.reason, self._requested_at = reason, self._clock()

    @property
    def requested(self) -> bool:
        """Whether the run is to stop: its time is over, or a stop was requested."""
        if self._end is not None and self._clock() >= self._end:
            self.request("its time limit")
        return bool(self.reason)

    @property
    def grace_left(self) -> float:
        """Seconds that work in flight still has; the whole grace period until a stop is requested."""
        return max(0.0, self._requested_at + self._grace - self._clock()) if self.requested else self._grace

    def check(self) -> None:
        """Raise StopRequested if the run is to stop."""
        if self.requested:
            raise StopRequested(self.reason)

    async def finish(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Result of `work()`. Raises WorkCancelled if a stop is requested before it starts, or if it has not finished
        at the end of the grace period."""
        if self.requested:
            raise WorkCancelled(self.reason)
        task = asyncio.ensure_future(work())
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=POLL_SECONDS)
                if self.requested and not self.grace_left and not task.done():
                    raise WorkCancelled(self.reason)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def by_user(self) -> bool:
        """Whether Ctrl-C was the reason."""
        return self.reason == CTRL_C

    @contextmanager
    def at_signals(self) -> Iterator[None]:
        """Make SIGTERM and Ctrl-C request a stop during a block of the main thread.

        A second Ctrl-C raises Interrupted, and ends the process if the block goes on for END_SECONDS; a second SIGTERM
        ends it. Until `begin` is called, the first Ctrl-C raises Interrupted, because there is nothing to save.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._received) for number in (signal.SIGINT, signal.SIGTERM)}
        self.watches_signals = True
        try:
            yield
        finally:
            self.watches_signals = False
            if self._exit is not None:
                self._exit.cancel()
            for number, action in previous.items():
                signal.signal(number, signal.SIG_DFL if action is None else action)

    def begin(self, ending: str = "the run stops after this step and saves a checkpoint") -> None:
        """Report that there is something to save: from now on the first Ctrl-C is a request, and prints how the command
        ends."""
        self._begun, self._ending = True, ending

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            if self._terminated:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self._terminated = True
            self.request("SIGTERM")
        elif self._begun and not self._interrupted:
            self._interrupted = True
            self.request(CTRL_C)
            message = f"\nCtrl-C: {self._ending}; Ctrl-C again ends it at once\n"
            os.write(2, message.encode())  # sys.stderr cannot be used while the code that was interrupted uses it
        else:
            if self._exit is None:
                self._exit = threading.Timer(END_SECONDS, os._exit, [130])
                self._exit.daemon = True
                self._exit.start()
            raise Interrupted
