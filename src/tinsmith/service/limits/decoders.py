"""Decoding of large bodies in processes of its own, and of other large work in few threads.

A JSON parser holds Python's lock from the first byte to the last, so that in a thread it would delay every other
response of the API process; the arrays of a forward_backward are thousands of short steps that hold it. A decoder
process (`python -m tinsmith.service.limits.decoders`) starts when the first large body needs it, reads pickled calls
from standard input, and ends when its parent closes that or dies.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from tinsmith.errors import Busy, TinsmithError, TooLarge
from tinsmith.service.concurrency import LARGE_BYTES

MEMORY_BYTES = 2**31
"""Address space of a process. A forward_backward of 256 MiB takes 7 times its size, a body of empty lists 30 times."""

P = ParamSpec("P")
R = TypeVar("R")


class Decoders:
    """Up to `size` processes, each of which decodes one body at a time."""

    def __init__(self, size: int = 2) -> None:
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="decoders")
        self._idle: list[subprocess.Popen[bytes]] = []

    async def run(self, size: int, decode: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Return the function's result. It runs in a process if `size` bytes are more than LARGE_BYTES.

        The function must be importable by name. Raises Tinsmith's errors as they are, others as a RuntimeError with the
        traceback, and Busy if the process dies.
        """
        if size <= LARGE_BYTES:
            return decode(*args, **options)
        call = asyncio.get_running_loop().run_in_executor(self._threads, self._call, (decode, args, options))
        is_error, value = await call
        if is_error:
            raise value
        return value

    async def run_in_thread(self, size: int, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Return the result of a function that works on `size` bytes, and releases Python's lock while it does.

        Large ones share few threads, so that small ones find a free one at once.
        """
        threads = self._threads if size > LARGE_BYTES else None
        return await asyncio.get_running_loop().run_in_executor(threads, partial(function, *args, **options))

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        while self._idle:
            _end(self._idle.pop())

    def _call(self, call: tuple[Any, ...]) -> tuple[bool, Any]:
        """Send a call to a process and wait for its reply. Runs in a thread."""
        try:
            worker = self._idle.pop()  # no look before: another thread may take the last one in between
        except IndexError:
            worker = _start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            pickle.dump(call, worker.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            worker.stdin.flush()
            reply = pickle.load(worker.stdout)
        except (OSError, EOFError):
            _end(worker)
            return True, Busy("The process that decoded the body ended.", "Submit it again, or send less at once.")
        self._idle.append(worker)
        return reply


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C interrupts only the server, which ends its workers
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
    )


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    with suppress(OSError), worker:  # closes the pipes and waits
        pass


def main() -> None:
    """Run calls from standard input until it ends. Replies are (whether an error was raised, value or error)."""
    calls, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.dup2(2, 1)  # any other output goes to the log
    with suppress(EOFError, BrokenPipeError, pickle.UnpicklingError):  # the parent has ended
        while True:
            function, args, options = pickle.load(calls)
            try:
                reply = False, function(*args, **options)
            except TinsmithError as error:
                reply = True, error
            except MemoryError:
                reply = True, TooLarge("The body needs too much memory to be decoded.", "Send less in one request.")
            except Exception as error:  # noqa: BLE001 - a bug fails this request alone; its class may not be picklable
                reply = True, RuntimeError("".join(traceback.format_exception(error)))
            pickle.dump(reply, replies, protocol=pickle.HIGHEST_PROTOCOL)
            replies.flush()


if __name__ == "__main__":
    main()
