"""A pool of processes: each fault of a call is that call's alone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tinsmith.errors import BadRequest
from tinsmith.processes.pool import CallError, ProcessLostError, ProcessPool

HERE = "tests.processes.test_pool"


def unpicklable() -> Any:
    return threading.Lock()


def refuse() -> None:
    error = BadRequest("no", "yes")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def with_pool(work: Callable[[ProcessPool], Awaitable[None]]) -> None:
    async def run() -> None:
        pool = ProcessPool(1, memory_bytes=4 << 30, threads_variable="OMP_NUM_THREADS", log=subprocess.DEVNULL)
        try:
            await work(pool)
        finally:
            await asyncio.to_thread(pool.close)

    asyncio.run(run())


def test_faults_of_calls_are_described_and_keep_the_process() -> None:
    async def work(pool: ProcessPool) -> None:
        first = await pool.call(os.getpid)
        with pytest.raises(CallError, match="cannot pickle"):
            await pool.call(f"{HERE}:unpicklable")
        with pytest.raises(CallError, match="cannot pickle"):
            await pool.call(f"{HERE}:refuse")
        with pytest.raises(CallError, match="ModuleNotFoundError: No module named 'missing'"):
            await pool.call("missing:function")
        with pytest.raises(CallError, match="ValueError: invalid literal") as raised:
            await pool.call(int, "no number", seconds=100)
        assert "Traceback" in raised.value.traceback
        with pytest.raises(BadRequest, match="no yes"):
            await pool.call(f"{HERE}:raise_given", BadRequest("no", "yes"))
        assert await pool.call("builtins:sorted", [1, 3, 2], reverse=True) == [3, 2, 1]
        assert await pool.call(os.getpid) == first

    with_pool(work)


def raise_given(error: Exception) -> None:
    raise error


def test_call_that_is_cancelled_before_it_begins_leaves_nothing() -> None:
    async def work(pool: ProcessPool) -> None:
        first = await pool.call(os.getpid)
        held = threading.Event()
        pool._threads.submit(held.wait)  # all threads of the pool are busy
        call = asyncio.create_task(pool.call(os.getpid))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        held.set()
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert await pool.call(os.getpid) != first

    with_pool(work)


def test_process_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")

    async def work(pool: ProcessPool) -> None:
        with pytest.raises(ProcessLostError, match="ended before the call"):
            await pool.call(os.getpid)

    with_pool(work)
