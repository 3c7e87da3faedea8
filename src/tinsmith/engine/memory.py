"""What memory there is, and how freed memory goes back to the system.

A training pass takes and frees a gigabyte of activations in pieces of every size, micro-batch after micro-batch. What
is given back and taken again costs a page fault for each 4 kB, so within a pass glibc is told to keep it. What
long-lived tensors leave between freed pieces adds up: an engine of 1.5 GB grew to 3 in a hundred steps. Trimming gives
it back; it costs a tenth of a second and page faults after, so it is done seldom. Elsewhere than on glibc nothing is
done.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SECONDS = 10.0
"""Between two trims."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 29
"""Freed memory at the end of the heap that is not given back before a trim."""
HEAP_BYTES = 1 << 25
"""Pieces up to this size come from the heap; glibc takes no greater number."""


class Trimmer:
    """Tells glibc to keep what is freed, for the whole process; and trims when asked, the first time and then not more
    often than every SECONDS."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
        try:
            self._trim = library.malloc_trim if library else None
        except AttributeError:  # another C library
            self._trim = None
        if library is not None and self._trim is not None:
            library.mallopt(_M_MMAP_THRESHOLD, HEAP_BYTES)
            library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        self._last = -SECONDS

    def __call__(self) -> None:
        if self._trim is not None and time.monotonic() - self._last >= SECONDS:
            self._trim(0)
            self._last = time.monotonic()


def free_bytes(root: Path = Path("/")) -> int:
    """What this process may still take: of the machine's memory, and within the limits of its control groups."""
    meminfo = root / "proc/meminfo"
    if not meminfo.is_file():  # no Linux: half of all there is
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return min([int(lines["MemAvailable"].split()[0]) * 1024, *_left(root)])


def _left(root: Path) -> Iterator[int]:
    """Bytes below each limit that a control group sets, version 1 or 2; pages of files are given back when wanted."""
    for folder, limit, used in _groups(root):
        if (folder / limit).is_file() and (most := (folder / limit).read_text().strip()) != "max":
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield max(0, int(most) - int((folder / used).read_text()) + int(stat.get("inactive_file", 0)))


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """(folder, file of its limit, file of its use) of the process's groups and of those above."""
    listed = root / "proc/self/cgroup"
    for line in listed.read_text().splitlines() if listed.is_file() else ():
        _, kinds, path = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        if not kinds:
            names = ("memory.max", "memory.current")
        elif "memory" in kinds.split(","):
            top, names = top / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        below = top / path.lstrip("/")
        for folder in (below, *below.parents):
            yield folder, names[0], names[1]
            if folder == top:
                break
