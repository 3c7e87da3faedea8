"""Execute a program that ends with its parent, in whatever way the parent ends: `python guard.py ARGUMENTS`.

vLLM's own Python runs this file, so it imports the standard library only. The arguments replace this process; a forked
process watches the parent, because vLLM does not, and vLLM itself, because its own children may outlive it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress

POLL_S = 0.5
"""Interval between two looks whether the program has ended."""
GRACE_S = 4.0
"""Time for the program to exit before it is killed."""


def main() -> None:
    """Entry point. Standard input is a pipe that only the parent holds open; the process leads its process group."""
    program = os.getpid()
    if os.fork() == 0:
        _guard(program)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


def _guard(program: int) -> None:
    """Wait until the program or the parent has ended, then kill the process group."""
    while os.getppid() == program:
        if select.select([0], [], [], POLL_S)[0]:
            with suppress(ProcessLookupError):  # it may have ended at the same moment
                os.kill(program, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
            while os.getppid() == program and time.monotonic() < deadline:
                time.sleep(POLL_S / 10)
            break
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
