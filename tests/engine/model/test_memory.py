"""What lies free in the heap: kept while there is work, given back when it is too much or nothing comes."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith.engine.model import memory
from tinsmith.engine.model.memory import Trimmer


class Counting(Trimmer):
    """Of a heap that says what it is told to; counts how often it was trimmed."""

    def __init__(self, *lies_free: int) -> None:
        super().__init__()
        self._lies_free, self.trims = iter(lies_free), 0

    def free(self) -> int:
        return next(self._lies_free)

    def now(self) -> None:
        super().now()
        self.trims += 1


async def _works(heap: Counting, times: int) -> list[int]:
    found = []
    for _ in range(times):
        heap.after_work()
        found.append(heap.trims)
    return found


def test_what_a_pass_needs_is_kept_and_what_is_more_given_back() -> None:
    mega = 1 << 20
    heap = Counting(2000 * mega, 2900 * mega, 3100 * mega, 700 * mega, 1000 * mega, 1100 * mega)
    assert asyncio.run(_works(heap, 6)) == [0, 0, 1, 1, 1, 2]


def test_an_idle_engine_gives_all_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "IDLE_SECONDS", 0.05)
    heap = Counting(*[1] * 5)

    async def rest() -> None:
        await _works(heap, 5)
        assert heap.trims == 0
        await asyncio.sleep(0.3)

    asyncio.run(rest())
    assert heap.trims == 1


def test_glibc_tells_what_lies_free() -> None:
    heap = Trimmer()
    if heap._heap is None:
        pytest.skip("no glibc, or an old one")
    pieces = [bytearray(1 << 24) for _ in range(8)]
    last = bytearray(1 << 20)  # so that the pieces are not at the heap's end
    held = heap.free() or 0  # other tests' leavings too, some of which the pieces may lie in
    pieces.clear()
    assert (heap.free() or 0) - held > 8 * (1 << 24) * 0.9
    heap.now()
    del last


def test_where_nothing_can_be_told_it_is_given_back_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    heap = Trimmer()
    monkeypatch.setattr(heap, "_heap", None)
    monkeypatch.setattr(heap, "_trim", trims.append)

    async def work() -> None:
        heap.after_work()
        heap.after_work()

    asyncio.run(work())
    assert trims == [0, 0]
