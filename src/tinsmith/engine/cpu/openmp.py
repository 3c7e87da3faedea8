"""Runs compiled functions in the threads of PyTorch's OpenMP.

These wait for work between PyTorch's operators, so that a function begins at once on every core, while threads of our
own would have to wait for theirs. Where PyTorch has no libgomp of its own, a function runs in the calling thread.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)


def run(function: Any, argument: int, threads: int) -> None:
    """Call a C function of Numba's with a pointer, in `threads` threads at once, of which fewer may come: the
    function must divide its work itself. Releases Python's lock."""
    library = _library() if threads > 1 else None
    if library is None:
        function.ctypes(argument)
    else:
        library.GOMP_parallel(function.address, argument, threads, 0)


def address_of_parallel() -> int:
    """The address of the function that runs others in threads, for compiled functions (`primitives.run_threads`); 0
    where there is none."""
    library = _library()
    return 0 if library is None else ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0


@cache
def _library() -> ctypes.CDLL | None:
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        library = ctypes.CDLL(str(path))  # loaded already, since PyTorch is linked with it
        library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = None
        return library
    log.info("PyTorch has no libgomp of its own here: attention is computed in one thread.")
    return None
