"""The memory pool of CUDA graphs, by PyTorch's interface without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch

from tinsmith.engine.sampling.paged.step import cuda_capture


class FakeGraph:
    """A graph that records its pool."""

    pool = 0

    def replay(self) -> None: ...


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def graph(made: Any, pool: int, capture_error_mode: str) -> Iterator[None]:
        made.pool = pool
        yield

    handles = count(1)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)


@pytest.mark.usefixtures("fake_cuda")
def test_graphs_share_a_pool_and_get_a_new_one_once_all_are_gone() -> None:
    """PyTorch asserts that a pool that is given to a capture has graphs, or had none yet."""
    capture = cuda_capture()

    def pool_of(graph: Any) -> int:
        return int(graph.replay.__self__.pool)

    first, second = capture(lambda: None), capture(lambda: None)
    shared = pool_of(first)
    assert pool_of(second) == shared
    del first
    third = capture(lambda: None)
    assert pool_of(third) == shared
    del second, third
    assert pool_of(capture(lambda: None)) != shared
