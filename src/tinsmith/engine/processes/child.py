"""The process of an engine, as seen by the process that starts it: its id, its end, its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Protocol

CHILD_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""OpenMP threads sleep while they wait for each other. By default they spin, which made decoding 6 to 10 times slower
when another process (a training loop, a browser) kept as many cores busy. Memory of a GPU is in segments that grow,
because each pass has another size and would leave gaps in fixed ones."""


class EngineProcess(Protocol):
    """The process of an engine: a child of this one, or one on another machine."""

    died: asyncio.Event

    @property
    def pid(self) -> int:
        """Process id on its machine."""
        ...

    @property
    def code(self) -> int | None:
        """Its exit code, minus the signal if a signal ended it; None while it runs, or if nobody knows."""
        ...

    def kill(self) -> None:
        """Begin to kill it with all processes that it started, also if it is stopped."""
        ...


class ChildProcess:
    """A child of this process, which leads its session. Implements EngineProcess."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.died = asyncio.Event()
        self._child = child
        self._watch = asyncio.create_task(self._wait())

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def code(self) -> int | None:
        return self._child.returncode

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill it and wait until it is gone."""
        if not self.died.is_set():
            self.kill()
        await asyncio.shield(self._watch)

    async def _wait(self) -> None:
        await self._child.wait()
        if self._child.stdin is not None:
            self._child.stdin.close()
        self.died.set()
