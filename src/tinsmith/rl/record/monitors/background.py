"""A monitor that works in a thread of its own, so that a tracker that is slow, or hangs, does not hold up the run."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from typing_extensions import override

from tinsmith.rl.diagnosis import Diagnosis
from tinsmith.rl.guards.user_code import describe
from tinsmith.rl.record.layout import Kind
from tinsmith.rl.record.monitors.base import Monitor
from tinsmith.rl.types import Group

MAX_WAITING = 10_000
"""Rows that may wait for the tracker; further ones are dropped."""
CLOSE_SECONDS = 60.0
"""How long the end of a run waits for the tracker."""

log = logging.getLogger(__name__)


class BackgroundMonitor(Monitor):
    """Passes metrics on in a thread, and rollouts if it is to."""

    def __init__(self, monitor: Monitor, *, close_seconds: float = CLOSE_SECONDS, with_rollouts: bool = False) -> None:
        self._with_rollouts = with_rollouts
        self._monitor, self._close_seconds = monitor, close_seconds
        self._name = type(monitor).__name__
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    @override
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        row = dict(values)
        self._put(step, lambda: self._monitor.metrics(step, row))

    def _put(self, step: int, call: Callable[[], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                log.warning(
                    "The monitor %s does not keep up; what is recorded from step %d on is dropped", self._name, step
                )

    @override
    def rollouts(self, step: int, kind: Kind, groups: Sequence[Group]) -> None:
        if self._with_rollouts:
            self._put(step, lambda: self._monitor.rollouts(step, kind, groups))

    @override
    def diagnosis(self, step: int, diagnosis: Diagnosis) -> None:
        with suppress(queue.Full):  # the next or the last diagnosis takes its place
            self._calls.put_nowait(lambda: self._monitor.diagnosis(step, diagnosis))

    @override
    def close(self) -> None:
        """Wait until everything is passed on, at most `close_seconds`."""
        try:
            self._calls.put(None, timeout=self._close_seconds)
        except queue.Full:
            pass
        else:
            self._thread.join(self._close_seconds)
        if self._thread.is_alive():
            log.warning("The monitor %s hangs; the run ends without it", self._name)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._try(call)
        self._try(self._monitor.close)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  a tracker that fails must not end its thread
            log.warning("The monitor %s failed: %s", self._name, describe(error))
