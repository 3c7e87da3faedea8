"""A pool of processes that call functions: what would hold Python's lock, hang or use much memory runs there.

The processes start when they are first needed and are used again. One that exceeds a time limit, runs out of memory or
whose caller is cancelled is killed. The event loop neither pickles nor waits: a thread for each process does.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tinsmith.processes.messages import receive, send
from tinsmith.processes.start import ConnectedChild, own_imports

START_S = 120.0
"""Time limit of starting a process and importing what a call needs."""
GRACE_S = 1.0
"""How long a process may exceed a time limit before it is killed."""


class CallError(Exception):
    """A call raised an error, which this describes in one line."""

    def __init__(self, text: str, traceback: str = "") -> None:
        super().__init__(text, traceback)
        self.text, self.traceback = text, traceback

    def __str__(self) -> str:
        return self.text


class ProcessLostError(CallError):
    """The process of a call ended, or did not start."""


class ProcessPool:
    """Up to `size` processes, each of which runs one call at a time."""

    def __init__(self, size: int, *, memory_bytes: int, threads_variable: str, log: int) -> None:
        """`memory_bytes`: address space of a process. `threads_variable`: which keeps libraries from starting threads
        there, such as OMP_NUM_THREADS. `log`: descriptor of a process's output."""
        self._memory_bytes, self._log = memory_bytes, log
        self._environment = {threads_variable: "1"}
        self._free = asyncio.Semaphore(size)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="process-pool")
        self._idle: list[ConnectedChild] = []

    async def call(
        self, function: Callable[..., Any] | str, *args: Any, seconds: float | None = None, **options: Any
    ) -> Any:
        """The result of a function, given by itself or as module:function.

        Raises TimeoutError after `seconds`, which do not include waiting for a process and its imports, TinsmithError
        and MemoryError as the function raises them, and CallError for any other error and for the end of its process.
        """
        async with self._free:
            child = self._ready()
            call = (function, args, options, seconds)
            reply = self._threads.submit(self._converse, child, call)
            try:
                is_error, value = await asyncio.wrap_future(reply)
            except asyncio.CancelledError:
                child.kill()  # `_converse` sees its end
                if reply.cancel():  # it has not begun
                    child.close()
                raise
        if is_error:
            raise value
        return value

    def close(self) -> None:
        """End all processes. Blocks."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    def _ready(self) -> ConnectedChild:
        """A process without a call. Started in the thread of the event loop: the system ends it with that thread."""
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                return child
            child.close()
        environment = {**own_imports(), **self._environment}
        module = "tinsmith.processes.pool_worker"
        return ConnectedChild(module, str(self._memory_bytes), environment=environment, log=self._log)

    def _converse(self, child: ConnectedChild, call: tuple[Any, ...]) -> tuple[bool, Any]:
        """Send a call and wait for its reply: whether it is an error, and the value or the error."""
        try:
            reply = _exchange(child, call)
        except BaseException:
            child.close()
            raise
        if isinstance(reply[1], MemoryError):  # what leaked is not freed by the next call
            child.close()
        else:
            self._idle.append(child)
        return reply


def _exchange(child: ConnectedChild, call: tuple[Any, ...]) -> tuple[bool, Any]:
    seconds = call[-1]
    try:
        child.connection.settimeout(START_S)
        send(child.connection, call)
        receive(child.connection)  # it has imported the function
    except TimeoutError as error:
        raise ProcessLostError(f"a worker process did not start within {START_S:g} s") from error
    except (EOFError, OSError) as error:
        raise ProcessLostError("the worker process ended before the call") from error
    child.connection.settimeout(None if seconds is None else seconds + GRACE_S)
    try:
        data = receive(child.connection)
    except TimeoutError:
        raise
    except (EOFError, OSError) as error:
        raise ProcessLostError("the worker process ended during the call") from error
    try:
        return pickle.loads(data)
    except Exception as error:
        raise CallError(f"the result cannot be decoded: {type(error).__name__}: {error}") from error
