"""Payloads of requests in files beside a SQLite database, which would write them twice: to its log and to its file.

A segment is a file that payloads are appended to. Payloads are on the disk before the commit that refers to them, so
what no row refers to is garbage: the torn end of a segment, and a segment whose rows were not committed. A segment is
removed when no row refers to it any more. A new process begins a new segment.

Methods that write are called by the thread of the store's writes only.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tinsmith.atomic import sync_folder

PAYLOADS_FOLDER = "payloads"
"""In a data folder."""
INLINE_BYTES = 32 * 1024
"""Largest payload that stays in its row: syncing a second file takes longer than writing these bytes twice."""
SEGMENT_BYTES = 8 << 20
"""A segment of this size gets no further payloads. One payload that is needed keeps a segment on the disk."""
_SUFFIX = ".payloads"
_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class PayloadPlace:
    """Where a payload is."""

    segment: int
    offset: int
    size: int


class PayloadFiles:
    """The segments of a data folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._descriptor: int | None = None
        self._end = 0
        """Size of the open segment."""
        self._segment = 0
        """Number of the open segment, or of the last one."""
        self._is_synced = True

    def append(self, payload: bytes) -> PayloadPlace:
        """Write a payload to the open segment. It is durable after `sync`. Raises OSError, and may then be repeated."""
        if self._descriptor is None or self._end >= SEGMENT_BYTES:
            self._open()
        assert self._descriptor is not None
        rest, offset = memoryview(payload), self._end
        while rest:
            written = os.pwrite(self._descriptor, rest, offset)
            rest, offset = rest[written:], offset + written
        place = PayloadPlace(self._segment, self._end, len(payload))
        self._end, self._is_synced = offset, False
        return place

    def sync(self) -> None:
        """Make all payloads durable."""
        if not self._is_synced and self._descriptor is not None:
            os.fsync(self._descriptor)
            self._is_synced = True

    def read(self, place: PayloadPlace) -> bytes:
        """A payload. Raises OSError if it is not there."""
        with self._path(place.segment).open("rb") as file:
            payload = os.pread(file.fileno(), place.size, place.offset)
        if len(payload) != place.size:
            raise OSError(f"{self._path(place.segment)} ends within a payload")
        return payload

    def remove_all_but(self, segments: Sequence[int]) -> None:
        """Remove the segments that are not in use, except the open one, and all while `held` is active elsewhere."""
        unused = self.segments().keys() - set(segments)
        if self._descriptor is not None:
            unused.discard(self._segment)
        if not unused:
            return
        with (self._root / _LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return
            for number in unused:
                self._path(number).unlink(missing_ok=True)

    def segments(self) -> dict[int, int]:
        """Size in bytes of each segment by its number."""
        if not self._root.is_dir():
            return {}
        return {int(file.stem): file.stat().st_size for file in self._root.glob(f"*{_SUFFIX}") if file.stem.isdecimal()}

    def close(self) -> None:
        """Close the open segment."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        """Begin a new segment. No number is used again, also by later processes: a copy of a segment stays right."""
        self.sync()
        self.close()
        _make(self._root)
        number = max([self._segment, *self.segments(), int(time.time()) - 1]) + 1
        descriptor = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            sync_folder(self._root)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor, self._segment, self._end = descriptor, number, 0

    def _path(self, segment: int) -> Path:
        return self._root / f"{segment:08d}{_SUFFIX}"


@contextmanager
def held(root: Path) -> Iterator[list[Path]]:
    """The segments in a folder, none of which is removed during the block; for a copy beside a running server."""
    _make(root)
    with (root / _LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield sorted(root.glob(f"*{_SUFFIX}"))


def _make(root: Path) -> None:
    """The folder, with its name on the disk: a segment that is synced in a folder without a name is lost."""
    if not root.is_dir():
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_folder(root.parent)
