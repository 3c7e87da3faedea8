"""Runs the program of a seat: `python -m tinsmith.engine.cluster.entry MODULE`.

The system ends it with its parent from now on, on Linux: the module imports libraries for seconds before its first call
opens the entrance (`dial.Entrance.open`), and a parent that is killed meanwhile would leave it running.
"""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1


def end_with_thread_of_parent() -> None:
    """Have the system kill this process when the thread that forked it ends, on Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Entry point of the process."""
    end_with_thread_of_parent()
    module = sys.argv[1]
    del sys.argv[1]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
