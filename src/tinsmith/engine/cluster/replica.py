"""A replica of a sampler pool: a process that is started, watched, and started again whenever it ends.

What the pool knows of a process (its load, the versions that it has) belongs to a SamplerProcess and ends with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field

from tinsmith.engine.base import OnDelta, SampleRequest, SampleResult, SavedAdapter
from tinsmith.engine.device_sharing import MemoryTurns
from tinsmith.engine.processes.client import ServedEngine
from tinsmith.engine.processes.supervisor import keep_running
from tinsmith.engine.sampling.capacity import cache_reserve
from tinsmith.errors import EngineDied, TinsmithError

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 5
"""Failed starts in a row after which waiting requests fail, and a process is started only when another one comes."""


@dataclass(eq=False, slots=True, kw_only=True)
class SamplerProcess:
    """A process that samples, with its model loaded, from its start to its end."""

    engine: ServedEngine
    """Its calls raise EngineDied once the process has ended."""
    ended: Callable[[], Awaitable[str]]
    """Waits until the process has ended, ends it if it stalls, and returns the reason."""
    turns: MemoryTurns | None = None
    """Those of a vLLM whose GPU the trainer has too; its samples pause while it sleeps. None: it waits for none."""
    number: int = 0
    """Of the pool; never used again."""
    load: int = 0
    """Cache tokens that its running requests reserve."""
    requests: int = 0
    """Running ones."""
    attached: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Versions that it has or is being given, by name."""

    async def attach(self, version: str, source: SavedAdapter) -> None:
        """Give it a version, unless it has it. Concurrent callers wait for one attach."""
        task = self.attached.get(version)
        if task is None:
            task = self.attached[version] = asyncio.create_task(self._attach(version, source))
        try:
            await asyncio.shield(task)
        except Exception:
            if self.attached.get(version) is task:
                del self.attached[version]
            raise

    async def detach(self, version: str) -> None:
        """Take a version from it, if it has it."""
        task = self.attached.pop(version, None)
        if task is not None:
            with suppress(TinsmithError):
                await task
                await self.engine.detach(version)

    async def sample(
        self, request: SampleRequest, saved: SavedAdapter | None, on_delta: OnDelta | None
    ) -> SampleResult:
        """Sample from a version, which it is given first; a cancelled request is cancelled in the process too."""
        tokens = cache_reserve(request)
        self.load += tokens
        self.requests += 1
        try:
            if request.version is not None and saved is not None:
                await self.attach(request.version, saved)
            async with self._turn(pausable=True):
                return await self.engine.sample(request, on_delta)
        except asyncio.CancelledError:
            with suppress(TinsmithError):
                await self.engine.cancel(request.request_id)
            raise
        finally:
            self.load -= tokens
            self.requests -= 1

    async def _attach(self, version: str, source: SavedAdapter) -> None:
        async with self._turn():
            await self.engine.attach(version, source)

    def _turn(self, *, pausable: bool = False) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self.turns is None else self.turns.turn("sampling", pausable=pausable)


Launch = Callable[[], Awaitable[SamplerProcess]]
"""Starts a process and waits until its model is loaded."""


class SamplerReplica:
    """A member of the pool, of which one process runs at a time."""

    def __init__(self, index: int, launch: Launch, numbers: Iterator[int], on_change: Callable[[], None]) -> None:
        """`numbers` gives each process its number; `on_change` is called when a process starts or ends."""
        self.index = index
        self.process: SamplerProcess | None = None
        """The running process; None while there is none."""
        self.starts = 0
        self.failure = ""
        """Why the process has not started MAX_FAILED_STARTS times in a row; it is then started again by `retry`."""
        self._retry = asyncio.Event()
        self._launch, self._numbers, self._on_change = launch, numbers, on_change
        self._started: SamplerProcess | None = None
        """The process that is to be closed, also once it has ended."""
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the first process. Raises the error of its start."""
        await self._start()
        name = f"Sampler {self.index}"
        self._watch = asyncio.create_task(keep_running(name, self._end, self._start, self._pause_starts))

    def retry(self) -> None:
        """Start a process that has not started for MAX_FAILED_STARTS times once more."""
        self._retry.set()

    async def close(self) -> None:
        """End the process for good."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        self._mark_down()
        started, self._started = self._started, None
        if started is not None:
            await started.engine.close()

    async def _start(self) -> None:
        self.process = self._started = await self._launch()
        self.process.number = next(self._numbers)
        self.starts += 1
        self.failure = ""
        self._on_change()

    async def _pause_starts(self, failed: int, error: Exception) -> None:
        """Wait for `retry` after MAX_FAILED_STARTS, unless the process died: a machine that was lost may come back."""
        if failed >= MAX_FAILED_STARTS and not isinstance(error, EngineDied):
            self._retry.clear()
            self.failure = str(error)
            self._on_change()
            await self._retry.wait()

    async def _end(self) -> str:
        """Wait until the process has ended and close what is left of it; returns the reason."""
        assert self._started is not None
        reason = await self._started.ended()
        self._mark_down()
        started, self._started = self._started, None
        try:
            await started.engine.close()
        except (TinsmithError, OSError) as error:
            log.warning("What is left of sampler %d did not close: %s", self.index, error)
        return reason

    def _mark_down(self) -> None:
        if self.process is not None:
            self.process = None
            self._on_change()
