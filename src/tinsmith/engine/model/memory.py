"""What memory there is, and how freed memory goes back to the system.

A training pass takes and frees a gigabyte of activations in pieces of every size, micro-batch after micro-batch. What
is given back and taken again costs a page fault for each 4 kB, up to a third of a short pass, so glibc is told to keep
it while there is work. What long-lived tensors leave between freed pieces adds up: an engine of 1.5 GB grew to 3 in a
hundred steps. So all is given back when more lies free than a pass needs, and when no work has come for a while.
Elsewhere than on glibc nothing is done.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

LEAST_FREE, GROWTH = 1 << 30, 1.5
"""Bytes of the heap that may lie free while there is work: so many, and so many times what the first work left."""
IDLE_SECONDS = 60.0
"""After the last work, until nothing lies free."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
HEAP_BYTES, NEVER = 1 << 25, (1 << 31) - 1
"""Pieces up to this size come from the heap; what is free at its end is never given back unasked. glibc takes no
greater numbers."""


class _Heap(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


class Trimmer:
    """Tells glibc to keep what is freed, for the whole process; and gives it back when asked or when it is too much."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
        try:
            self._trim = library.malloc_trim if library else None
        except AttributeError:  # another C library
            self._trim = None
        self._heap = _counting(library)
        self._usual = 0
        """Bytes that lay free after the first work since all was given back."""
        self._idle: asyncio.TimerHandle | None = None
        if library is not None and self._trim is not None:
            library.mallopt(_M_MMAP_THRESHOLD, HEAP_BYTES)
            library.mallopt(_M_TRIM_THRESHOLD, NEVER)

    def after_work(self) -> None:
        """Give all back if too much lies free, else when nothing more comes; from within an event loop."""
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.now)
        free = self.free()
        if free is None:
            self.now()
            return
        self._usual = self._usual or free
        if free > max(LEAST_FREE, GROWTH * self._usual):
            self.now()

    def now(self) -> None:
        """Give back all that lies free."""
        if self._trim is not None:
            self._trim(0)
        self._usual = 0

    def free(self) -> int | None:
        """Bytes of the heap that lie free; None where glibc is too old to tell, or another library."""
        return None if self._heap is None else int(self._heap().fordblks)


def _counting(library: ctypes.CDLL | None) -> Callable[[], _Heap] | None:
    """glibc's own count, from 2.33 on."""
    try:
        count = library.mallinfo2 if library else None
    except AttributeError:
        return None
    if count is not None:
        count.restype = _Heap
    return count


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
