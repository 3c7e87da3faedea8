"""Signs of life of a child process: heartbeats with a progress counter, the watch over them, and why a process ended.

A thread of the child sends a heartbeat twice a second, also while the child computes. No heartbeat means that the
process is stopped or frozen; a progress counter that stands still while calls run means that it hangs.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HEARTBEAT_S = 0.5
SILENCE_S = 30.0
"""Longest time without a heartbeat. Loading a message or a library may hold Python's lock, and with it the thread that
sends heartbeats, for seconds."""
SILENCE_SHARE = 0.75
"""The same as a share of a short time-out for progress: a process that is stopped makes no progress either."""
LOAD_TIMEOUT_S = 600.0
"""Longest time in which a process that loads a model neither computes nor reads nor writes. A download writes."""

_FROM_OUTSIDE = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
_HINTS: dict[int, str] = {
    signal.SIGFPE: "an arithmetic fault in native code, such as an integer division that overflows",
    signal.SIGSEGV: "a memory fault in native code",
    signal.SIGBUS: "a memory fault: a mapped file was truncated, or shared memory is full",
    signal.SIGILL: "native code that this processor does not have",
    signal.SIGABRT: "native code gave up; its message is in the log before this line",
    signal.SIGXCPU: "it used more processor time than allowed",
}


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


class Pulse:
    """What the parent knows of a child's life.

    Times are counted in ticks of `stalled`. While the parent itself cannot run, heartbeats wait in the socket; however
    long that takes, it is one tick.
    """

    def __init__(self) -> None:
        self.progress = 0
        self.silent_s = 0.0
        """Since the last heartbeat."""
        self.progress_age_s = 0.0
        """Since the last progress, while calls run."""
        self._oom_kills = [oom_kills()] * 3

    def beat(self, heartbeat: Heartbeat) -> None:
        """A heartbeat has arrived."""
        self.silent_s = 0.0
        if heartbeat.progress != self.progress:
            self.progress, self.progress_age_s = heartbeat.progress, 0.0

    async def stalled(self, timeout_s: float, silence_s: float, is_busy: Callable[[], bool]) -> Stall:
        """Wait until the child makes no progress for `timeout_s` while busy, or sends no heartbeat for `silence_s`."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._oom_kills = [*self._oom_kills[1:], oom_kills()]
            self.silent_s += HEARTBEAT_S
            self.progress_age_s = self.progress_age_s + HEARTBEAT_S if is_busy() else 0.0
            if self.silent_s > silence_s:
                return Stall(f"no heartbeat for {silence_s:g} s: it is stopped, or the machine is out of memory", True)
            if self.progress_age_s > timeout_s:
                return Stall(f"no progress for {timeout_s:g} s", False)

    def memory_ran_out(self) -> bool:
        """Whether the system has killed a process for its memory within the last second. True if that is unknown."""
        before, now = self._oom_kills[0], oom_kills()
        return before is None or now is None or now > before


@dataclass(frozen=True, slots=True)
class Stall:
    """Why a child counts as stalled."""

    reason: str
    from_outside: bool
    """Whether no request can be the cause: a process that is stopped does not run any."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """Why a process ended."""

    text: str
    from_outside: bool
    """Whether someone ended it, so that what it ran is not the cause."""


def process_end(code: int | None, *, memory_ran_out: bool) -> ProcessEnd:
    """The end of a process with this exit code, which is minus the signal for one that a signal ended."""
    if code is None:
        return ProcessEnd("its connection closed", from_outside=False)
    if code >= 0:
        return ProcessEnd(f"exit status {code}", from_outside=False)
    number = -code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number in _FROM_OUTSIDE:
        return ProcessEnd(f"{name}: someone ended it", from_outside=True)
    if number == signal.SIGKILL:
        cause = "the system killed it, most likely because memory ran out" if memory_ran_out else "someone killed it"
        return ProcessEnd(f"{name}: {cause}", from_outside=not memory_ran_out)
    return ProcessEnd(f"{name}: {_HINTS.get(number, 'a fault in native code')}", from_outside=False)


def oom_kills() -> int | None:
    """Processes that this machine has killed because memory ran out; None where the system does not count them."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
