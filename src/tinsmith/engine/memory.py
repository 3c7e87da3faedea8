"""Give freed memory back to the system.

A training pass takes and frees a gigabyte of activations in pieces of every size; glibc keeps them, and what long-lived
tensors leave between them adds up: an engine of 1.5 GB grew to 3 in a hundred steps. Trimming costs a tenth of a second
and some page faults after, so it is done seldom. Elsewhere than on glibc nothing is done.
"""

from __future__ import annotations

import ctypes
import sys
import time

SECONDS = 10.0
"""Between two trims."""


class Trimmer:
    """Trims when asked, but not more often than every SECONDS."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
        try:
            self._trim = library.malloc_trim if library else None
        except AttributeError:  # another C library
            self._trim = None
        self._last = time.monotonic()

    def __call__(self) -> None:
        if self._trim is not None and time.monotonic() - self._last >= SECONDS:
            self._trim(0)
            self._last = time.monotonic()
