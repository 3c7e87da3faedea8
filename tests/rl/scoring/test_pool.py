"""Worker processes: time limits hold, the event loop stays free, and nothing reaches the terminal."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tinsmith.processes import pool as processes
from tinsmith.rl.scoring.pool import ComparisonError, ScoringPool

HERE = "tests.rl.scoring.comparisons"


def with_pool(work: Callable[[ScoringPool], Awaitable[Any]], size: int = 1) -> Any:
    """The result of `work` with a pool that is closed afterwards."""

    async def run() -> Any:
        pool = ScoringPool(size)
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def process_exists(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_are_reused_and_end_with_the_pool():
    async def work(pool: ScoringPool) -> list[int]:
        first = [await pool.call(f"{HERE}:process_id", seconds=100) for _ in range(3)]
        return first + await asyncio.gather(*(pool.call(f"{HERE}:process_id", seconds=100) for _ in range(6)))

    numbers = with_pool(work, size=2)
    assert len(set(numbers[:3])) == 1
    assert 1 <= len(set(numbers)) <= 2
    assert os.getpid() not in numbers
    assert not any(map(process_exists, numbers))


def test_no_process_is_started_without_a_call():
    async def work(pool: ScoringPool) -> None:
        assert pool._pool._idle == []

    with_pool(work)


@pytest.mark.parametrize("value", ["é\u2212\ud800\0", {"a": [1, 2.5, None]}, ""], ids=["text", "mapping", "empty"])
def test_values_pass_unchanged(value):
    assert with_pool(lambda pool: pool.call(f"{HERE}:echo", value, seconds=100)) == value


def test_arguments_may_be_long():
    assert with_pool(lambda pool: pool.call("builtins:len", "x" * 2_000_000, seconds=100)) == 2_000_000


def test_time_limit_interrupts_python_and_keeps_the_process(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 40.0)  # on a machine that stands still, the signal may come late

    async def work(pool: ScoringPool) -> tuple[int, int]:
        before = await pool.call(f"{HERE}:process_id", seconds=100)
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            await pool.call(f"{HERE}:wait", 60, seconds=0.1)
        assert time.monotonic() - begin < 40
        return before, await pool.call(f"{HERE}:process_id", seconds=100)

    before, after = with_pool(work)
    assert before == after


def test_process_that_hangs_is_killed_and_replaced(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.1)

    async def work(pool: ScoringPool) -> tuple[int, int]:
        before = await pool.call(f"{HERE}:process_id", seconds=100)
        with pytest.raises(TimeoutError):
            await pool.call(f"{HERE}:hang", seconds=0.1)
        return before, await pool.call(f"{HERE}:process_id", seconds=100)

    before, after = with_pool(work)
    assert before != after
    assert not process_exists(before)


def test_cancelled_call_ends_its_process():
    async def work(pool: ScoringPool) -> tuple[int, int]:
        before = await pool.call(f"{HERE}:process_id", seconds=100)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await pool.call(f"{HERE}:wait", 60, seconds=60)
        return before, await pool.call(f"{HERE}:process_id", seconds=100)

    before, after = with_pool(work)
    assert before != after
    assert not process_exists(before)


def test_errors_are_reported_and_output_is_discarded(capfd):
    async def work(pool: ScoringPool) -> Any:
        with pytest.raises(ComparisonError, match="ValueError: secret"):
            await pool.call(f"{HERE}:print_and_raise", "secret", seconds=100)
        with pytest.raises(ComparisonError, match="the worker process ended"):
            await pool.call(f"{HERE}:exit_process", seconds=100)
        with pytest.raises(ComparisonError, match="has no 'missing'"):
            await pool.call(f"{HERE}:missing", seconds=100)
        with pytest.raises(ComparisonError, match="MemoryError"):
            await pool.call(f"{HERE}:allocate", 8 << 30, seconds=100)
        return await pool.call(f"{HERE}:echo", 1, seconds=100)

    assert with_pool(work) == 1
    printed = capfd.readouterr()
    assert "secret" not in printed.out + printed.err
