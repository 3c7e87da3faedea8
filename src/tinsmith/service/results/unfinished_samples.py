"""The ids of samples whose clients do not know yet that they ended, in a file for the next process.

Results of samples are only in memory. A client that waits for a completion log would wait forever after a restart, so
the next process must know which samples are lost. A line is `+id` or `-id`; it is written at once and never synced, so
the file survives the death of the process but not a power cut. A failing disk stops no sample: the file is rewritten
when the disk works again.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Time between two attempts to write to a failing disk."""
SLACK = 10_000
"""The file is rewritten at this many lines beyond four per unfinished id."""


class UnfinishedSamples:
    """The unfinished ids, in memory and in the file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._ids = dict.fromkeys(_read(file))
        self.lost = tuple(self._ids)
        """The ids that an earlier process did not finish."""
        self._lines = 0
        self._retry_at: float | None = None
        """Next attempt to write, while the file is not up to date."""
        self._descriptor = self._rewrite()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str) -> None:
        """Add a sample that was accepted."""
        self._ids[request_id] = None
        self._write([f"+{request_id}"])

    def remove(self, request_ids: Iterable[str]) -> None:
        """Remove samples whose clients know that they ended, or which no client waits for."""
        removed = [request_id for request_id in request_ids if request_id in self._ids]
        for request_id in removed:
            del self._ids[request_id]
        self._write([f"-{request_id}" for request_id in removed])

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _write(self, lines: list[str]) -> None:
        if not lines or (self._retry_at is not None and time.monotonic() < self._retry_at):
            return
        self._lines += len(lines)
        try:
            if self._retry_at is not None or self._lines > 4 * len(self._ids) + SLACK:
                descriptor = self._rewrite()
                os.close(self._descriptor)
                self._descriptor, self._retry_at = descriptor, None
            else:
                _append(self._descriptor, lines)
        except OSError as error:
            if self._retry_at is None:
                log.error(
                    "%s cannot be written: after a crash clients may wait for lost samples. %s", self._file, error
                )
            self._retry_at = time.monotonic() + RETRY_S

    def _rewrite(self) -> int:
        """Replace the file by one with the unfinished ids only, and return its descriptor."""
        temporary = self._file.with_suffix(".new")
        temporary.write_text("".join(f"+{request_id}\n" for request_id in self._ids))
        temporary.replace(self._file)
        self._lines = len(self._ids)
        return os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _append(descriptor: int, lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in lines).encode()
    if os.write(descriptor, text) < len(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read(file: Path) -> list[str]:
    """The unfinished ids in a file, whose last line may be incomplete."""
    ids: dict[str, None] = {}
    text = file.read_text(errors="replace") if file.is_file() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        if line.startswith("+"):
            ids[line[1:]] = None
        else:
            ids.pop(line[1:], None)
    return list(ids)
