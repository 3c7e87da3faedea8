"""HeapTrimmer returns free heap memory when it exceeds the need of a pass or the engine is idle."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.engine.sampling.helpers import sample_request
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.model import memory
from tinsmith.engine.model.memory import HeapTrimmer, from_heap
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


def test_free_heap_bytes_grow_by_what_is_freed() -> None:
    heap = HeapTrimmer()
    if heap._mallinfo is None:
        pytest.skip("no glibc, or an old one")
    pieces = [bytearray(1 << 24) for _ in range(8)]
    last = bytearray(1 << 20)  # so that the pieces are not at the heap's end
    before = heap.free_heap_bytes() or 0  # includes memory that other tests freed
    pieces.clear()
    assert (heap.free_heap_bytes() or 0) - before > 8 * (1 << 24) * 0.9
    heap.trim()
    del last


@pytest.mark.parametrize("in_heap", [True, False])
def test_largest_tensors_are_in_the_heap_only_where_requested(in_heap: bool) -> None:
    """Logits, taken again and again, cost no page faults; the rows of a cache leave no holes."""
    heap = HeapTrimmer()
    if heap._mallinfo is None:
        pytest.skip("no glibc, or an old one")

    def stays_in_heap(requested: bool) -> bool:
        """Whether the heap keeps a tensor that is larger than what is free in it, so that it fits in no hole."""
        size = (heap.free_heap_bytes() or 0) + (1 << 27)
        with from_heap(size if requested else 0):
            tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
        before = heap.free_heap_bytes() or 0
        del tensor
        return (heap.free_heap_bytes() or 0) - before > size // 2

    assert stays_in_heap(in_heap) == in_heap
    assert not stays_in_heap(False)
    heap.trim()


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
