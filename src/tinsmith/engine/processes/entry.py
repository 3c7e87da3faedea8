"""Runs the program of a slot: `python -m tinsmith.engine.processes.entry MODULE`.

The system ends it with its parent from now on, on Linux: the module imports libraries for seconds before its first call
(`worker.open_link`), and a parent that is killed meanwhile would leave it running.
"""

from __future__ import annotations

import runpy
import sys

from tinsmith.engine.processes.parent import end_with_forking_thread, is_closed


def main() -> None:
    """Entry point of the process."""
    end_with_forking_thread()
    if is_closed(0):  # the parent ended before
        return
    module = sys.argv[1]
    del sys.argv[1]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
