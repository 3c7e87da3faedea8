"""Free space of the data folder: what is refused while it is low, and room for the database to commit deletions.

Saves, new sessions and uploads are refused while less than the reserve is free. Training requests are accepted until
only an eighth of the reserve is left, since their results need room as well. A small file beside SQLite's database is
removed when SQLite finds the disk full, so that deletions can be committed, and written again once there is room.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tinsmith.errors import Busy
from tinsmith.plurals import display_bytes

log = logging.getLogger(__name__)

TRAINING_SHARE = 8
"""Training requests are accepted until 1 / TRAINING_SHARE of the reserve is left."""
DATABASE_SHARE, MAX_DATABASE_BYTES = 16, 1 << 24
"""The file for the database has this part of the reserve, and at most so many bytes."""
CACHE_S = 1.0
"""Time for which a measurement is used."""
CHECK_S = 10.0
"""Time between two measurements without a request."""
RETRY_S = 5.0
"""Time after which a client retries what was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskState:
    """Free space of the data folder's file system."""

    free_bytes: int
    reserve_bytes: int

    @property
    def is_low(self) -> bool:
        """Whether less than the reserve is free."""
        return self.free_bytes < self.reserve_bytes


def free_disk_bytes(folder: Path) -> int:
    """Bytes that an unprivileged process can still write to the folder's file system."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


class DiskMonitor:
    """Watches the free space of a data folder. Logs a warning when it becomes low, and when there is room again."""

    def __init__(
        self,
        folder: Path,
        reserve_bytes: int,
        measure: Callable[[Path], int] = free_disk_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._reserve_bytes = folder, reserve_bytes
        self._measure, self._clock = measure, clock
        self._database_file = folder / "database.reserve"
        self._measured_at = -CACHE_S
        self._free_bytes = 0
        self._was_low = False

    def state(self) -> DiskState:
        """Free space, measured at most CACHE_S ago."""
        now = self._clock()
        if now >= self._measured_at + CACHE_S:
            self._measured_at, self._free_bytes = now, self._measure(self._folder)
        state = DiskState(free_bytes=self._free_bytes, reserve_bytes=self._reserve_bytes)
        if state.is_low != self._was_low:
            self._was_low = state.is_low
            if state.is_low:
                log.warning("%s. Saves, new sessions and uploads are refused until there is room.", self._shortage())
            else:
                log.warning("%s has room again: %s are free.", self._folder, display_bytes(state.free_bytes))
        return state

    @property
    def is_low(self) -> bool:
        """Whether less than the reserve is free."""
        return self.state().is_low

    def require(self, size: int = 0) -> None:
        """Raise Busy unless the reserve stays free when `size` more bytes are written."""
        self._require(size, self._reserve_bytes)

    def require_for_training(self, size: int) -> None:
        """Raise Busy unless the part of the reserve that training may not use stays free."""
        self._require(size, self._reserve_bytes // TRAINING_SHARE)

    async def run(self) -> None:
        """Forever: measure, and keep the file for the database."""
        while True:
            if not self.is_low:
                await asyncio.to_thread(self._keep_database_file)
            await asyncio.sleep(CHECK_S)

    def release_database_file(self) -> None:
        """Give the database its room. Called when a transaction found the disk full, and at the end."""
        self._database_file.unlink(missing_ok=True)

    def _keep_database_file(self) -> None:
        size = min(self._reserve_bytes // DATABASE_SHARE, MAX_DATABASE_BYTES)
        if size == 0 or self._database_file.exists():
            return
        try:
            with self._database_file.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError:
            self.release_database_file()

    def _require(self, size: int, reserve: int) -> None:
        if self.state().free_bytes - size < reserve:
            raise Busy(
                f"The server's disk is nearly full: {self._shortage()}.",
                "Delete checkpoints, or end sessions that are no longer needed; the server's operator can free space.",
                retry_after_ms=int(1000 * RETRY_S),
            )

    def _shortage(self) -> str:
        free, reserve = display_bytes(self._free_bytes), display_bytes(self._reserve_bytes)
        return f"{free} are free in {self._folder.name}, {reserve} are kept in reserve (disk_reserve)"
