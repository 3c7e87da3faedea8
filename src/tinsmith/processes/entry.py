"""Runs a module in a child process: `python -m tinsmith.processes.entry MODULE ARGUMENTS`.

The system ends it with its parent from now on, on Linux: the module may import libraries for seconds before it reads
from its parent, and a parent that is killed meanwhile would leave it running.
"""

from __future__ import annotations

import runpy
import signal
import sys

from tinsmith.processes.parent import end_with_forking_thread, is_closed


def main() -> None:
    """Entry point of the process."""
    end_with_forking_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its children
    if is_closed(0):  # the parent ended before
        return
    module = sys.argv[1]
    del sys.argv[1]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
