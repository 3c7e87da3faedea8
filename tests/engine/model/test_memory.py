"""HeapTrimmer returns free heap memory when it exceeds the need of a pass or the engine is idle."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.engine.sampling.helpers import sample_request
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.model import memory
from tinsmith.engine.model.memory import HeapTrimmer
from tinsmith.engine.torch_engine import TorchEngine


class Counting(HeapTrimmer):
    """Reports the given free bytes and counts its trims."""

    def __init__(self, *free_bytes: int) -> None:
        super().__init__()
        self._free_bytes, self.trims = iter(free_bytes), 0

    def free_heap_bytes(self) -> int:
        return next(self._free_bytes)

    def trim(self) -> None:
        super().trim()
        self.trims += 1


async def _trims_after_work(heap: Counting, times: int) -> list[int]:
    trims = []
    for _ in range(times):
        heap.after_work()
        trims.append(heap.trims)
    return trims


def test_heap_is_trimmed_when_more_than_a_pass_needs_is_free() -> None:
    mega = 1 << 20
    heap = Counting(2000 * mega, 2900 * mega, 3100 * mega, 700 * mega, 1000 * mega, 1100 * mega)
    assert asyncio.run(_trims_after_work(heap, 6)) == [0, 0, 1, 1, 1, 2]


def test_idle_engine_trims_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "IDLE_SECONDS", 0.05)
    heap = Counting(*[1] * 5)

    async def rest() -> None:
        await _trims_after_work(heap, 5)
        assert heap.trims == 0
        await asyncio.sleep(0.3)

    asyncio.run(rest())
    assert heap.trims == 1


def test_heap_is_trimmed_after_samples_too(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that never trains frees the caches of its sequences too."""
    monkeypatch.setattr(memory, "IDLE_SECONDS", 0.05)
    trimmed = asyncio.Event()

    async def sampled() -> None:
        engine = TorchEngine(EngineConfig(source=str(tiny_llama), dtype="float32", device="cpu", threads=1))
        monkeypatch.setattr(HeapTrimmer, "trim", lambda self: trimmed.set())
        await engine.sample(sample_request(max_tokens=2))
        await asyncio.wait_for(trimmed.wait(), 60)

    asyncio.run(sampled())


@pytest.mark.parametrize(("count", "size"), [(8, 1 << 24), (2, 1 << 27)])
def test_free_heap_bytes_grow_by_what_is_freed(count: int, size: int) -> None:
    """By the largest tensors too: taken again, they cost no page faults."""
    heap = HeapTrimmer()
    if heap._mallinfo is None:
        pytest.skip("no glibc, or an old one")
    pieces = [bytearray(size) for _ in range(count)]
    last = bytearray(1 << 20)  # so that the pieces are not at the heap's end
    before = heap.free_heap_bytes() or 0  # includes memory that other tests freed
    pieces.clear()
    assert (heap.free_heap_bytes() or 0) - before > count * size * 0.9
    heap.trim()
    del last


def test_heap_is_trimmed_after_each_work_without_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    heap = HeapTrimmer()
    monkeypatch.setattr(heap, "_mallinfo", None)
    monkeypatch.setattr(heap, "_malloc_trim", trims.append)

    async def work() -> None:
        heap.after_work()
        heap.after_work()

    asyncio.run(work())
    assert trims == [0, 0]
