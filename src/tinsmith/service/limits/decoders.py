"""Decoding of large bodies in processes of its own, and of other large work in few threads.

A JSON parser holds Python's lock from the first byte to the last, so that in a thread it would delay every other
response of the API process; the arrays of a forward_backward are thousands of short steps that hold it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from tinsmith.errors import Busy, TooLarge
from tinsmith.processes.pool import CallError, ProcessLostError, ProcessPool
from tinsmith.service.concurrency import LARGE_BYTES

MEMORY_BYTES = 2**31
"""Address space of a process. A forward_backward of 256 MiB takes 7 times its size, a body of empty lists 30 times."""
STANDARD_ERROR = 2

P = ParamSpec("P")
R = TypeVar("R")


class Decoders:
    """Up to `size` processes, each of which decodes one body at a time."""

    def __init__(self, size: int = 2) -> None:
        self._pool = ProcessPool(
            size, memory_bytes=MEMORY_BYTES, threads_variable="OPENBLAS_NUM_THREADS", log=STANDARD_ERROR
        )
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="decoders")

    async def run(self, size: int, decode: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Return the function's result. It runs in a process if `size` bytes are more than LARGE_BYTES.

        The function must be importable by name. Raises Tinsmith's errors as they are, others as a RuntimeError with the
        traceback, and Busy if the process dies.
        """
        if size <= LARGE_BYTES:
            return decode(*args, **options)
        try:
            return await self._pool.call(decode, *args, **options)
        except ProcessLostError as error:
            message = "The process that decoded the body ended."
            raise Busy(message, "Submit it again, or send less at once.") from error
        except MemoryError as error:
            message = "The body needs too much memory to be decoded."
            raise TooLarge(message, "Send less in one request.") from error
        except CallError as error:  # a bug fails this request alone
            raise RuntimeError(error.traceback or error.text) from error

    async def run_in_thread(self, size: int, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Return the result of a function that works on `size` bytes, and releases Python's lock while it does.

        Large ones share few threads, so that small ones find a free one at once.
        """
        threads = self._threads if size > LARGE_BYTES else None
        return await asyncio.get_running_loop().run_in_executor(threads, partial(function, *args, **options))

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._pool.close()
