"""Worker processes for comparisons that may take long or hang. The event loop stays free meanwhile.

A pool belongs to a run and is shared by its rewards. Its processes start when they are first needed and write nothing
to the terminal.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import Any

from tinsmith.errors import TinsmithError
from tinsmith.processes.pool import CallError, ProcessPool

MEMORY_BYTES = 4 << 30
"""Address space of a process. A comparison that needs more fails with a MemoryError."""


class ComparisonError(Exception):
    """A comparison raised an exception, or its process ended."""


class ScoringPool:
    """At most `size` worker processes; one per CPU core by default, at most 8."""

    def __init__(self, size: int | None = None) -> None:
        size = size or min(8, os.cpu_count() or 1)
        self._pool = ProcessPool(
            size, memory_bytes=MEMORY_BYTES, threads_variable="OMP_NUM_THREADS", log=subprocess.DEVNULL
        )

    async def call(self, function: str, *arguments: Any, seconds: float | None) -> Any:
        """The result of a function, named as module:function, in a worker process.

        Raises TimeoutError after `seconds`, which do not include waiting for a process and its imports, and
        ComparisonError if the function raises or its process ends. None: the function limits its own time.
        """
        try:
            return await self._pool.call(function, *arguments, seconds=seconds)
        except CallError as error:
            raise ComparisonError(error.text) from error
        except (TinsmithError, MemoryError) as error:
            raise ComparisonError(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """End all processes. No call may be in progress."""
        await asyncio.to_thread(self._pool.close)
