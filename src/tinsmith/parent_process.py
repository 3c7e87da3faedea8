"""Child processes that end with their parent, in whatever way the parent ends.

A child holds a pipe or socket whose other end only its parent holds. The system closes that end when the parent ends,
after a SIGKILL too, and the child reads the end of the file. PR_SET_PDEATHSIG has faults that this has not: only Linux
has it, it misses a parent that ended before the call, and it takes the end of the thread that started the child for the
end of the parent.

- The engine (engine/process.py) reads the end of its socket of messages.
- An embedded service (service/embedded.py) watches its standard input with `on_parent_end`.
- vLLM (engine/vllm/server.py) is another program: engine/vllm/guard.py watches its standard input.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def on_parent_end(descriptor: int, end: Callable[[], None]) -> None:
    """Call `end` in a thread when the other end of `descriptor` closes. Nothing else may read the descriptor."""
    threading.Thread(target=_watch, args=(descriptor, end), name="parent-watch", daemon=True).start()


def _watch(descriptor: int, end: Callable[[], None]) -> None:
    while os.read(descriptor, 1):  # not sys.stdin.read: this thread would hold its lock at interpreter exit
        pass
    end()
