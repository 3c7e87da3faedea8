"""Samples whose clients do not know yet that they ended, as a file: what a process that died leaves to the next one.

Results of samples live in memory alone. Whoever waits for a log of completions would wait for ever after a restart, so
the next process must know which samples to call lost. A line is `+id` or `-id`; written at once, never synced: it
survives the death of the process, not a power cut. A disk that takes no line stops no sample: the file is written
anew when it does again.
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
"""Between two attempts to write the file while the disk does not take it."""
SLACK = 10_000
"""Lines beyond four for each open id at which the file is written anew."""


class UnfinishedSamples:
    """Open ids, in memory and in the file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._open = dict.fromkeys(_read(file))
        self.lost = tuple(self._open)
        """Ids that the process before this one left open."""
        self._lines = 0
        self._retry: float | None = None
        """When the file may be tried again, if it does not hold what is open."""
        self._out = self._rewrite()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def add(self, request_id: str) -> None:
        """Promised."""
        self._open[request_id] = None
        self._write([f"+{request_id}"])

    def remove(self, request_ids: Iterable[str]) -> None:
        """Their clients know that they ended, and ask for the results by themselves; or nobody waits for them."""
        known = [one for one in request_ids if one in self._open]
        for one in known:
            del self._open[one]
        self._write([f"-{one}" for one in known])

    def close(self) -> None:
        """No more is written."""
        os.close(self._out)

    def _write(self, lines: list[str]) -> None:
        if not lines or (self._retry is not None and time.monotonic() < self._retry):
            return
        self._lines += len(lines)
        try:
            if self._retry is not None or self._lines > 4 * len(self._open) + SLACK:
                fresh = self._rewrite()
                os.close(self._out)
                self._out, self._retry = fresh, None
            else:
                _append(self._out, lines)
        except OSError as error:
            if self._retry is None:
                log.error(
                    "%s cannot be written: after a crash clients may wait for lost samples. %s", self._file, error
                )
            self._retry = time.monotonic() + RETRY_S

    def _rewrite(self) -> int:
        """The file with what is open and nothing else."""
        scratch = self._file.with_suffix(".new")
        scratch.write_text("".join(f"+{one}\n" for one in self._open))
        scratch.replace(self._file)
        self._lines = len(self._open)
        return os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _append(out: int, lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in lines).encode()
    if os.write(out, text) < len(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read(file: Path) -> list[str]:
    """What is open at the end of the file; its last line may be half written."""
    found: dict[str, None] = {}
    text = file.read_text(errors="replace") if file.is_file() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        if line.startswith("+"):
            found[line[1:]] = None
        else:
            found.pop(line[1:], None)
    return list(found)
