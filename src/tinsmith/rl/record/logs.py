"""The log of a run: log.txt in its folder, rotated at 5 MB, with three older files.

An entry starts with `2026-11-21 16:00:00,123 INFO tinsmith.rl.run.loop: message`; lines without such a start belong
to the entry before. `tinsmith log` shows the entries of `read` and `follow`.
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
from tinsmith.rl.record.layout import Layout

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_BEGINS = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>[A-Z]+) ")
_BYTES, _OLDER = 5_000_000, 3
_LOOK_S = 0.3


@contextmanager
def log_to_folder(folder: Path, level: str = "INFO") -> Iterator[None]:
    """Within the block, write log records of the package from `level` on to log.txt, and the error that ends the block.

    Warnings are still shown on the terminal. Records of other packages are written from WARNING on.
    """
    root, package = logging.getLogger(), logging.getLogger("tinsmith")
    log_file = RotatingFileHandler(
        Layout(folder).log, maxBytes=_BYTES, backupCount=_OLDER, encoding="utf-8", delay=True
    )
    log_file.setFormatter(logging.Formatter(_FORM))
    added: list[logging.Handler] = [log_file]
    if not root.handlers:  # once the root logger has an output, logging no longer shows warnings on the terminal itself
        terminal = logging.StreamHandler()
        terminal.setLevel(logging.WARNING)
        added.append(terminal)
    previous_level = package.level
    package.setLevel(level)
    for output in added:
        root.addHandler(output)
    try:
        yield
    except BaseException as error:
        log_file.handle(_error_record(error))
        raise
    finally:
        for output in added:
            root.removeHandler(output)
            output.close()
        package.setLevel(previous_level)


def read(folder: Path, *, keyword: str = "", last: int = 0, level: str = "") -> list[str]:
    """Log entries that contain `keyword` (ignoring case), from `level` on, oldest first; 0 for `last` returns all."""
    newest = Layout(folder).log
    files = [*(newest.with_name(f"{newest.name}.{number}") for number in range(_OLDER, 0, -1)), newest]
    entries = [entry for file in files if file.exists() for entry in _entries(file.read_text(encoding="utf-8"))]
    matches = [entry for entry in entries if _matches(entry, keyword, level)]
    return matches[-last:] if last else matches


def follow(folder: Path, *, keyword: str = "", level: str = "") -> Iterator[str]:
    """New entries as they are written; never ends."""
    file = Layout(folder).log
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
            yield from (entry for entry in _entries(whole.decode("utf-8")) if _matches(entry, keyword, level))
        time.sleep(_LOOK_S)


def _error_record(error: BaseException) -> logging.LogRecord:
    """A log record of the error, without a traceback for a TinsmithError, whose message is shown anyway."""
    trace = None if isinstance(error, TinsmithError) else (type(error), error, error.__traceback__)
    message, args = "The run was stopped by %s: %s", (type(error).__name__, error)
    return logging.LogRecord(__name__, logging.ERROR, __file__, 0, message, args, trace)


def _entries(text: str) -> list[str]:
    entries: list[str] = []
    for line in text.splitlines():
        if _BEGINS.match(line) or not entries:
            entries.append(line)
        else:
            entries[-1] += "\n" + line
    return entries


def _matches(entry: str, keyword: str, level: str) -> bool:
    if keyword.lower() not in entry.lower():
        return False
    start = _BEGINS.match(entry)
    if not level or start is None:
        return not level
    return LEVELS.index(start["level"]) >= LEVELS.index(level)
