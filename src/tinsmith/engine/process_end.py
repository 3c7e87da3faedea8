"""Why a process ended, by its exit code and the system's count of processes killed for memory."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

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
