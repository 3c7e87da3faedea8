"""A CUDA graph's stand-in for tests: the operators of a function on their tensors, which can be run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tinsmith.engine.sampling.paged.step import Graph


class Recorder(TorchDispatchMode):
    """Records the operators within its context."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def signature(self) -> list[tuple[Any, ...]]:
        """Each operator with its arguments: addresses of tensors that were there before, or that none of the operators
        made; of others their shape."""
        made: set[int] = set()
        rows = []
        for func, args, kwargs, result in self.calls:
            leaves = [
                (leaf.untyped_storage().data_ptr() not in made and leaf.data_ptr(), tuple(leaf.shape))
                if _is_tensor(leaf)
                else id(leaf)
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in tree_leaves((args, kwargs))
            ]
            before = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
            storages = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(result) if _is_tensor(leaf)}
            made |= storages - before
            rows.append((str(func), *leaves))
        return rows

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operators on the recorded tensors, into the recorded results."""
        for func, args, kwargs, result in self.calls:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if _is_tensor(old) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _is_tensor(leaf: Any) -> bool:
    """Weights in a layout of the CPU's own have no address."""
    return isinstance(leaf, Tensor) and not leaf.is_mkldnn


def capture(run: Callable[[], None]) -> Graph:
    """As `step.cuda_capture`, whose capture computes nothing: here results are what they were before."""
    recorder = Recorder()
    with recorder:
        run()
    return Graph(recorder.replay)


class CountingCapture:
    """`capture`, with a count of the replays of all its graphs."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, run: Callable[[], None]) -> Graph:
        graph = capture(run)

        def replay() -> None:
            self.replays += 1
            graph.replay()

        return Graph(replay)
