"""Free memory of the machine, and how freed heap memory is returned to the operating system.

A training pass allocates and frees a gigabyte of activations in pieces of every size, micro-batch after micro-batch.
Returning memory and taking it again costs a page fault for each 4 kB, up to a third of a short pass, so glibc is
configured to keep freed memory while there is work. Long-lived tensors between freed pieces fragment the heap: an
engine of 1.5 GB grew to 3 GB in a hundred steps. So all free memory is returned when more of it is free than a pass
needs, and when the engine is idle. With another C library than glibc nothing is done.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

MIN_FREE_BYTES, FREE_GROWTH = 1 << 30, 1.5
"""The heap is trimmed if more than this many bytes, and more than this many times what the first pass left, are
free."""
IDLE_SECONDS = 60.0
"""The heap is trimmed this long after the last pass or sample."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
MAX_HEAP_CHUNK, NEVER_TRIM = 1 << 25, (1 << 31) - 1
"""Allocations up to this size come from the heap, whose free end glibc never returns by itself. glibc accepts no larger
values. What is larger, and fits in no hole of the heap, has pages of its own: freed, it leaves no hole."""
MAX_MAPPINGS = 1 << 16
"""glibc's default of allocations that have pages of their own."""


class _Heap(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


class HeapTrimmer:
    """Makes glibc keep freed memory, for the whole process, and returns it in `trim`."""

    def __init__(self) -> None:
        library = _glibc()
        self._malloc_trim = None if library is None else library.malloc_trim
        self._mallinfo = _mallinfo2(library)
        self._usual = 0
        """Free bytes after the first pass since the last trim."""
        self._idle: asyncio.TimerHandle | None = None
        if library is not None:
            library.mallopt(_M_MMAP_THRESHOLD, MAX_HEAP_CHUNK)
            library.mallopt(_M_TRIM_THRESHOLD, NEVER_TRIM)
            library.mallopt(_M_ARENA_MAX, 1)  # what one thread frees, the next pass of another takes

    def trim_when_idle(self) -> None:
        """Trim IDLE_SECONDS after the last call. Must be called from an event loop, as `after_work`."""
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.trim)

    def after_work(self) -> None:
        """After a pass: trim if too much is free, else once the engine is idle."""
        self.trim_when_idle()
        free = self.free_heap_bytes()
        if free is None:
            self.trim()
            return
        self._usual = self._usual or free
        if free > max(MIN_FREE_BYTES, FREE_GROWTH * self._usual):
            self.trim()

    def trim(self) -> None:
        """Return all free memory to the operating system."""
        if self._malloc_trim is not None:
            self._malloc_trim(0)
        self._usual = 0

    def free_heap_bytes(self) -> int | None:
        """Free bytes of the heap; None with another C library or a glibc before 2.33."""
        return None if self._mallinfo is None else int(self._mallinfo().fordblks)


@contextmanager
def from_heap(size: int) -> Iterator[None]:
    """Have a tensor of `size` bytes come from the heap, if it is allocated within the block, however large it is.

    For what is allocated again and again, as logits are: with pages of its own, each time costs a page fault for each
    4 kB. Not for what stays, as a cache's rows do: they come in every size, and the holes that they leave in the heap
    doubled the memory of an engine that sampled for minutes.
    """
    library = _glibc() if size > MAX_HEAP_CHUNK else None
    if library is not None:
        library.mallopt(_M_MMAP_MAX, 0)
    try:
        yield
    finally:
        if library is not None:
            library.mallopt(_M_MMAP_MAX, MAX_MAPPINGS)


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    try:
        return library if library and library.malloc_trim else None
    except AttributeError:
        return None


def _mallinfo2(library: ctypes.CDLL | None) -> Callable[[], _Heap] | None:
    """glibc's heap statistics, from 2.33 on."""
    try:
        function = library.mallinfo2 if library else None
    except AttributeError:
        return None
    if function is not None:
        function.restype = _Heap
    return function


def free_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can still allocate: the machine's available memory, within its control groups' limits."""
    meminfo = _meminfo(root)
    if not meminfo:  # not Linux: half of the physical memory
        return total_bytes(root) // 2
    return min([meminfo["MemAvailable"], *_cgroup_headroom(root)])


def total_bytes(root: Path = Path("/")) -> int:
    """Bytes of the machine's memory, or of the least limit of its control groups."""
    physical = _meminfo(root).get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(most for _, _, most in _limited_cgroups(root))])


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes by the names of Linux; empty elsewhere."""
    file = root / "proc/meminfo"
    lines = [line.split() for line in file.read_text().splitlines()] if file.is_file() else []
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}


def _cgroup_headroom(root: Path) -> Iterator[int]:
    """Bytes left below the limit of each control group (version 1 or 2); cached file pages count as free."""
    for folder, used, most in _limited_cgroups(root):
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        yield max(0, most - int((folder / used).read_text()) + cached)


def _limited_cgroups(root: Path) -> Iterator[tuple[Path, str, int]]:
    """(folder, file of the usage, bytes allowed) of the control groups that limit memory."""
    for folder, limit, used in _cgroups(root):
        if (folder / limit).is_file() and (most := (folder / limit).read_text().strip()) != "max":
            yield folder, used, int(most)


def _cgroups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """(folder, file of the limit, file of the usage) of the process's control groups and their parents."""
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
