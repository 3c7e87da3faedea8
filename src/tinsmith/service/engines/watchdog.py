"""The watchdog of an engine process: ends one that hangs or is stopped, so that its worker starts another."""

from __future__ import annotations

import logging
from typing import Protocol

from tinsmith.engine.process_end import ProcessEnd
from tinsmith.engine.processes.heartbeat import HeartbeatMonitor, Stall

log = logging.getLogger(__name__)


class WatchedProcess(Protocol):
    """An engine's process; `engine.processes.client.RemoteEngine` is one."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    heartbeats: HeartbeatMonitor
    end: ProcessEnd | None
    """Why it ended."""

    def running(self) -> str:
        """The calls that it runs, for the log."""
        ...

    async def stalled(self, timeout_s: float) -> Stall:
        """Wait until it counts as stalled."""
        ...

    def kill(self, end: ProcessEnd) -> None:
        """End it at once."""
        ...


async def end_when_stalled(process: WatchedProcess, timeout_s: float, source: str) -> None:
    """Wait until the process is stalled, then log why and kill it."""
    stall = await process.stalled(timeout_s)
    log.error(
        "The engine of %s (process %d) is stalled and is killed: %s. It was running: %s.",
        *(source, process.pid, stall.reason, process.running() or "nothing"),
    )
    process.kill(ProcessEnd(f"stalled: {stall.reason}", stall.from_outside))
