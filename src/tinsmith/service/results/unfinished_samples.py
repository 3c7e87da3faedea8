"""The ids of samples whose clients do not know yet that they ended, in a file for the next process.

Results of samples are only in memory. A client that waits for a completion log would wait forever after a restart, so
the next process must know which samples are lost. A line is `+id` or `-id`; it is written at once and never synced, so
the file survives the death of the process but not a power cut. Zeros after the last line keep room for more, also on a
full disk. While the file cannot be written, samples are refused with a status that clients retry.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from tinsmith.errors import Busy

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Time between two attempts to write to a failing disk."""
ROOM = 1 << 20
"""Bytes for further lines; the file is rewritten when they are full."""


class UnfinishedSamples:
    """The unfinished ids, in memory and in the file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._ids = dict.fromkeys(_read(file))
        self.lost = tuple(self._ids)
        """The ids that an earlier process did not finish."""
        self._retry_at: float | None = None
        """Next attempt to write, while the file is not up to date."""
        self._descriptor, self._end, self._size = self._open()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str) -> None:
        """Add a sample before it is accepted. Raises Busy if the file cannot be written."""
        self._ids[request_id] = None
        if not self._write([f"+{request_id}"]):
            del self._ids[request_id]
            raise Busy("The data folder cannot be written.", "Retry in a moment; the server's log has the reason.")

    def remove(self, request_ids: Iterable[str]) -> None:
        """Remove samples whose clients know that they ended, or which no client waits for."""
        removed = [request_id for request_id in request_ids if request_id in self._ids]
        for request_id in removed:
            del self._ids[request_id]
        self._write([f"-{request_id}" for request_id in removed])

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _write(self, lines: list[str]) -> bool:
        """Append lines. Whether the file is up to date after that."""
        if not lines:
            return True
        if self._retry_at is not None and time.monotonic() < self._retry_at:
            return False
        text = "".join(f"{line}\n" for line in lines).encode()
        try:
            if self._retry_at is not None or self._end + len(text) > self._size:
                earlier = self._descriptor
                self._descriptor, self._end, self._size = self._rewrite()
                os.close(earlier)
                self._retry_at = None
            else:
                _write_at(self._descriptor, text, self._end)
                self._end += len(text)
            return True
        except OSError as error:
            if self._retry_at is None:
                log.error("%s cannot be written; samples are refused until it can. %s", self._file, error)
            self._retry_at = time.monotonic() + RETRY_S
            return False

    def _open(self) -> tuple[int, int, int]:
        """Rewrite the file, or go on with it as it is if the disk is full. Returns its descriptor, end and size."""
        try:
            return self._rewrite()
        except OSError:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
            return descriptor, len(_lines(self._file)), os.fstat(descriptor).st_size

    def _rewrite(self) -> tuple[int, int, int]:
        """Replace the file by one with the unfinished ids only. Returns its descriptor, end and size."""
        text = "".join(f"+{request_id}\n" for request_id in self._ids).encode()
        size = len(text) + ROOM
        temporary = self._file.with_suffix(".new")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            _write_at(descriptor, text, 0)
            temporary.replace(self._file)
        except OSError:
            os.close(descriptor)
            temporary.unlink()
            raise
        return descriptor, len(text), size


def _write_at(descriptor: int, text: bytes, offset: int) -> None:
    if os.pwrite(descriptor, text, offset) < len(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read(file: Path) -> list[str]:
    """The unfinished ids in a file."""
    ids: dict[str, None] = {}
    for line in _lines(file).decode(errors="replace").splitlines():
        if line.startswith("+"):
            ids[line[1:]] = None
        else:
            ids.pop(line[1:], None)
    return list(ids)


def _lines(file: Path) -> bytes:
    """The complete lines of a file, whose last line may be incomplete."""
    written = file.read_bytes().partition(b"\0")[0] if file.is_file() else b""
    return written[: written.rfind(b"\n") + 1]
