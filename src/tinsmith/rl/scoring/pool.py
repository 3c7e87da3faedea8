"""Worker processes for comparisons that may take long or hang. The event loop stays free meanwhile.

A pool belongs to a run and is shared by its rewards. Its processes start when they are first needed and write nothing
to the terminal. A process that exceeds the time limit of a comparison, and does not stop by itself, is killed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import sys
from contextlib import suppress
from typing import Any

from tinsmith.rl.scoring import worker

START_SECONDS = 120.0
"""Time limit of starting a process and importing what a comparison needs."""
GRACE_SECONDS = 1.0
"""How long a process may exceed a time limit before it is killed."""


class ComparisonError(Exception):
    """A comparison raised an exception, or its process ended."""


class ScoringPool:
    """At most `size` worker processes; one per CPU core by default, at most 8."""

    def __init__(self, size: int | None = None) -> None:
        self._slots = asyncio.Semaphore(size or min(8, os.cpu_count() or 1))
        self._idle: list[_Process] = []
        self._ended = set[asyncio.Task[None]]()

    async def call(self, function: str, *arguments: Any, seconds: float) -> Any:
        """The result of a function, named as module:function, in a worker process.

        Raises TimeoutError after `seconds`, which do not include waiting for a process and its imports, and
        ComparisonError if the function raises or its process ends.
        """
        async with self._slots:
            process = await self._ready_process()
            try:
                reply = await process.compare(function, arguments, seconds)
            except BaseException:
                self._end(process)
                raise
            if "MemoryError" in reply.get("error", ""):  # what leaked is not freed by the next comparison
                self._end(process)
            else:
                self._idle.append(process)
        if "timeout" in reply:
            raise TimeoutError
        if "error" in reply:
            raise ComparisonError(reply["error"])
        return reply["value"]

    async def close(self) -> None:
        """End all processes. No call may be in progress."""
        while self._idle:
            self._end(self._idle.pop())
        await asyncio.gather(*self._ended)

    async def _ready_process(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            self._end(process)
        return await _Process.start()

    def _end(self, process: _Process) -> None:
        ended = asyncio.create_task(process.end())
        self._ended.add(ended)
        ended.add_done_callback(self._ended.discard)


class _Process:
    """A worker process. It makes one comparison at a time."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self._child, self._stdin, self._stdout = child, child.stdin, child.stdout

    @classmethod
    async def start(cls) -> _Process:
        # A session of its own: Ctrl-C reaches only the run, which ends its workers.
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", worker.__name__),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        )
        return cls(child)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._child.returncode is None

    async def compare(self, function: str, arguments: tuple[Any, ...], seconds: float) -> dict[str, Any]:
        """The reply of the process. Raises TimeoutError if it exceeds the time limit."""
        with suppress(ConnectionError):
            self._stdin.write(base64.b64encode(pickle.dumps((function, arguments, seconds))) + b"\n")
            await self._stdin.drain()
        try:
            async with asyncio.timeout(START_SECONDS):
                begun = await self._stdout.readline()
        except TimeoutError as error:
            raise ComparisonError(f"a worker process did not start within {START_SECONDS:g} s") from error
        async with asyncio.timeout(seconds + GRACE_SECONDS):
            reply = await self._stdout.readline() if begun else b""
        if not reply:
            raise ComparisonError("the worker process ended during the comparison")
        return json.loads(reply)

    async def end(self) -> None:
        """Kill the process and wait for it."""
        with suppress(ProcessLookupError):
            self._child.kill()
        self._stdin.close()
        await self._child.wait()
