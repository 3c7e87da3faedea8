"""What was read from files, kept until a file changes. What was used longest ago is forgotten first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_ENTRIES = 4096
"""Results that are kept; all are small."""

Mark = tuple[int, int]
"""Size and time of change of a file."""


class FileCache:
    """Results of reading functions, by file and name, while size and time of change of the file stay the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: OrderedDict[tuple[Path, str], tuple[Mark, Any]] = OrderedDict()

    def read(self, file: Path, name: str, function: Callable[[Path], T]) -> T | None:
        """`function(file)`; None if the file is not there or cannot be read."""
        try:
            mark, result = _mark(file), self.current(file, name)
            result = function(file) if result is None else result
        except (OSError, ValueError):
            return None
        with self._lock:
            self._results[file, name] = (mark, result)
            self._results.move_to_end((file, name))
            while len(self._results) > _ENTRIES:
                self._results.popitem(last=False)
        return result

    def current(self, file: Path, name: str) -> Any:
        """What was read, if the file has not changed since; else None."""
        with self._lock:
            mark, result = self._results.get((file, name), (None, None))
        try:
            return result if mark == _mark(file) else None
        except OSError:
            return None


def _mark(file: Path) -> Mark:
    status = file.stat()
    return status.st_size, status.st_mtime_ns
