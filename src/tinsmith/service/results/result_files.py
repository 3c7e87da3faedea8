"""Results on disk that take too much memory, in files without a name: they end with the process.

A file is closed, and with that removed, when none of its results is needed any more. Only `write` and `read` may be
called in a thread.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_BYTES = 16 << 20
"""A file of this size gets no further results. One result that is needed keeps its file on the disk."""


@dataclass(slots=True, eq=False)
class _File:
    file: Any
    size: int = 0
    results: int = 0
    readers: int = 0


@dataclass(frozen=True, slots=True)
class ResultPlace:
    """Where a result is."""

    file: _File
    offset: int
    size: int


class ResultFiles:
    """Files of a folder."""

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._open: list[_File] = []
        """The last of them gets the next result."""

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self._open)

    def reserve(self, size: int) -> ResultPlace:
        """A place for a result of this size. Raises OSError."""
        if not self._open or self._open[-1].size >= self._file_bytes:
            self._open.append(_File(tempfile.TemporaryFile(dir=self._folder, buffering=0)))  # noqa: SIM115
        file = self._open[-1]
        place = ResultPlace(file, file.size, size)
        file.size, file.results = file.size + size, file.results + 1
        return place

    def write(self, place: ResultPlace, body: bytes) -> None:
        """Write a result to its place. Raises OSError."""
        rest, offset = memoryview(body), place.offset
        while rest:
            written = os.pwrite(place.file.file.fileno(), rest, offset)
            rest, offset = rest[written:], offset + written

    def read(self, place: ResultPlace) -> bytes:
        """A result that was written. Raises OSError."""
        return os.pread(place.file.file.fileno(), place.size, place.offset)

    @contextmanager
    def held(self, place: ResultPlace) -> Iterator[None]:
        """Keep a result's file for the duration of the block, whatever is removed meanwhile."""
        place.file.readers += 1
        try:
            yield
        finally:
            place.file.readers -= 1
            self._close_unneeded(place.file)

    def remove(self, place: ResultPlace) -> None:
        """The result is not needed any more."""
        place.file.results -= 1
        self._close_unneeded(place.file)

    def close(self) -> None:
        """Remove all files; one that is being read, after that."""
        for file in list(self._open):
            file.results = 0
            self._close_unneeded(file)

    def _close_unneeded(self, file: _File) -> None:
        if not file.results and not file.readers:
            file.file.close()
            self._open.remove(file)
