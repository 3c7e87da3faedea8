"""The log of a run: log.txt in its folder, rotated at 5 MB, with three older files.

A line is `2026-11-21 16:00:00,123 INFO tinsmith.rl.train: what happened`; lines that do not begin so belong to the one
before. `read` and `follow` are what `tinsmith log` shows.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

from tinsmith.errors import TinsmithError

FILE = "log.txt"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_BEGINS = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>[A-Z]+) ")
_BYTES, _OLDER = 5_000_000, 3
_LOOK_S = 0.3


@contextmanager
def log_to_folder(folder: Path, level: str = "INFO") -> Iterator[None]:
    """While the block runs, what the package logs from `level` on is in the folder too, and what ended the block.

    Warnings stay on the terminal; other packages log from WARNING on.
    """
    root, ours = logging.getLogger(), logging.getLogger("tinsmith")
    into = RotatingFileHandler(folder / FILE, maxBytes=_BYTES, backupCount=_OLDER, encoding="utf-8", delay=True)
    into.setFormatter(logging.Formatter(_FORM))
    added: list[logging.Handler] = [into]
    if not root.handlers:  # else logging's last resort, which shows warnings, would fall silent
        shown = logging.StreamHandler()
        shown.setLevel(logging.WARNING)
        added.append(shown)
    before = ours.level
    ours.setLevel(level)
    for one in added:
        root.addHandler(one)
    try:
        yield
    except BaseException as error:
        into.handle(_ended(error))
        raise
    finally:
        for one in added:
            root.removeHandler(one)
            one.close()
        ours.setLevel(before)


def read(folder: Path, *, keyword: str = "", last: int = 0, level: str = "") -> list[str]:
    """The log's entries, oldest first: those with `keyword` (any case), from `level` on; all, or the `last` ones."""
    files = [folder / f"{FILE}.{number}" for number in range(_OLDER, 0, -1)] + [folder / FILE]
    entries = [entry for file in files if file.exists() for entry in _entries(file.read_text(encoding="utf-8"))]
    found = [entry for entry in entries if _wanted(entry, keyword, level)]
    return found[-last:] if last else found


def follow(folder: Path, *, keyword: str = "", level: str = "") -> Iterator[str]:
    """Entries as they are written from now on, without end."""
    file = folder / FILE
    at = file.stat().st_size if file.exists() else 0
    while True:
        size = file.stat().st_size if file.exists() else 0
        if size < at:  # rotated
            at = 0
        if size > at:
            with file.open("rb") as lines:
                lines.seek(at)
                written = lines.read()
            whole = written[: written.rfind(b"\n") + 1]
            at += len(whole)
            yield from (entry for entry in _entries(whole.decode("utf-8")) if _wanted(entry, keyword, level))
        time.sleep(_LOOK_S)


def _ended(error: BaseException) -> logging.LogRecord:
    """A log record of the error, without a traceback for a TinsmithError; whoever catches it prints it."""
    trace = None if isinstance(error, TinsmithError) else (type(error), error, error.__traceback__)
    words = ("The run was broken off by %s: %s", (type(error).__name__, error))
    return logging.LogRecord(__name__, logging.ERROR, __file__, 0, *words, trace)


def _entries(text: str) -> list[str]:
    entries: list[str] = []
    for line in text.splitlines():
        if _BEGINS.match(line) or not entries:
            entries.append(line)
        else:
            entries[-1] += "\n" + line
    return entries


def _wanted(entry: str, keyword: str, level: str) -> bool:
    if keyword.lower() not in entry.lower():
        return False
    found = _BEGINS.match(entry)
    if not level or found is None:
        return not level
    return LEVELS.index(found["level"]) >= LEVELS.index(level)
