"""Heartbeats of a process, with a progress counter, and the watch over them.

A thread of the child sends a heartbeat twice a second, also while the child computes. No heartbeat means that the
process is stopped or frozen; a progress counter that stands still while calls run means that it hangs.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tinsmith.engine.process_end import ProcessEnd, oom_kills

HEARTBEAT_S = 0.5
SILENCE_S = 30.0
"""Longest time without a heartbeat. Loading a message or a library may hold Python's lock, and with it the thread that
sends heartbeats, for seconds."""
SILENCE_SHARE = 0.75
"""The same as a share of a short time-out for progress: a process that is stopped makes no progress either."""
LOAD_TIMEOUT_S = 600.0
"""Longest time in which a process that loads a model neither computes nor reads nor writes. A download writes."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The child is alive; `progress` grows with its work."""

    progress: int


def send_heartbeats(send: Callable[[Heartbeat], None], progress: Callable[[], int]) -> None:
    """Send a heartbeat every HEARTBEAT_S from a thread of its own, until this process ends."""

    def beat() -> None:
        while True:
            send(Heartbeat(progress()))
            time.sleep(HEARTBEAT_S)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def blocks_moved() -> int:
    """Blocks that this process has read from and written to disks: writing a large file is progress."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_inblock + usage.ru_oublock


def load_progress() -> int:
    """Progress while a model is downloaded and loaded: blocks moved, and whole seconds of processor time."""
    return blocks_moved() + int(time.process_time())


def followers_seconds(leader: int) -> float:
    """Processor time of the processes in the session that a process leads, without its own; 0 without /proc."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()  # from the third on: proc_pid_stat(5)
            if fields[3] == str(leader) and file.parent.name != str(leader):
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(eq=False, slots=True)
class Wait:
    """How long something is overdue, in ticks of this process's own life."""

    fault: str
    """What is missing, such as `no heartbeat`."""
    limit_s: float = math.inf
    seconds: float = 0.0


async def first_overdue(waits: Callable[[], Iterable[Wait]], tick_s: float) -> Wait:
    """Count ticks for the waits of each moment until one is over its limit.

    While this process itself cannot run, what it waits for is in the socket; however long that takes, it is one tick.
    """
    while True:
        await asyncio.sleep(tick_s)
        for wait in waits():
            wait.seconds += tick_s
            if wait.seconds > wait.limit_s:
                return wait


class HeartbeatMonitor:
    """Watches the heartbeats of a process, in its parent."""

    def __init__(self) -> None:
        self.progress = 0
        self._silence, self._standstill = Wait("no heartbeat"), Wait("no progress")
        self._oom_kills = [oom_kills()] * 3

    @property
    def progress_age_s(self) -> float:
        """Seconds since the last progress, while calls run."""
        return self._standstill.seconds

    def beat(self, heartbeat: Heartbeat) -> None:
        """A heartbeat has arrived."""
        self._silence.seconds = 0.0
        if heartbeat.progress != self.progress:
            self.progress, self._standstill.seconds = heartbeat.progress, 0.0

    async def stalled(self, timeout_s: float, silence_s: float, is_busy: Callable[[], bool]) -> ProcessEnd:
        """Wait until the child makes no progress for `timeout_s` while busy, or sends no heartbeat for `silence_s`.

        Returns the reason to end it. A process that is stopped runs no request that could be the cause.
        """
        self._standstill.limit_s, self._silence.limit_s = timeout_s, silence_s

        def waits() -> Iterator[Wait]:
            self._oom_kills = [*self._oom_kills[1:], oom_kills()]
            yield self._silence
            if is_busy():
                yield self._standstill
            else:
                self._standstill.seconds = 0.0

        wait = await first_overdue(waits, HEARTBEAT_S)
        if wait is self._silence:
            cause = "it is stopped, or the machine is out of memory"
            return ProcessEnd(f"stalled: no heartbeat for {silence_s:g} s: {cause}", from_outside=True)
        return ProcessEnd(f"stalled: no progress for {timeout_s:g} s", from_outside=False)

    def memory_ran_out(self) -> bool:
        """Whether the system has killed a process for its memory within the last second. True if that is unknown."""
        before, now = self._oom_kills[0], oom_kills()
        return before is None or now is None or now > before
