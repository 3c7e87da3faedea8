"""The attention calls of a packed pass as tables, with which a compiled function computes all of a layer's at once.

`packed` has the functions. Imports no Numba before the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.cpu import openmp
from tinsmith.engine.cpu.arguments import KINDS

THREAD_SCORES = 1 << 14
"""Scores of a layer from which several threads are faster than one."""


@dataclass(frozen=True, slots=True)
class KeyRun:
    """Consecutive keys, from start to stop of one of a pass's sources of keys and values."""

    start: int
    stop: int
    source: int = 0


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The consecutive queries from start to stop, and the keys that they see."""

    start: int
    stop: int
    runs: tuple[KeyRun, ...]
    """All keys that any of the queries sees."""
    visible: np.ndarray | None = None
    """bool [Q, M]: whether a query sees each of the last M keys; all see those before. None: the queries are the last
    keys, and each sees those up to itself."""

    @property
    def keys(self) -> int:
        return sum(run.stop - run.start for run in self.runs)


@dataclass(frozen=True, slots=True)
class CompiledCalls:
    """Calls that compiled functions compute. The layers of a pass share them, and so may threads."""

    calls: np.ndarray
    """`packed.CALL` [calls]."""
    runs: np.ndarray
    """`packed.RUN`."""
    masks: Sequence[np.ndarray]
    """What the calls have addresses of."""

    @classmethod
    def of(cls, calls: Sequence[AttentionCall]) -> CompiledCalls:
        from tinsmith.engine.cpu import packed

        table, runs, masks = list[tuple[int, ...]](), list[tuple[int, ...]](), list[np.ndarray]()
        for call in calls:
            keys, count = call.keys, call.stop - call.start
            seen, visible = _seen(call, keys)
            table.append(
                (call.start, count, len(runs), len(call.runs), keys, seen.ctypes.data, visible.shape[1],
                 visible.ctypes.data)
            )  # fmt: skip
            runs.extend((run.start, run.stop - run.start, run.source) for run in call.runs)
            masks.extend((seen, visible))
        return cls(np.array(table, packed.CALL), np.array(runs, packed.RUN), masks)

    def forward(
        self, query: Tensor, sources: Sequence[tuple[Tensor, Tensor]], scale: float
    ) -> Tensor:
        """query [1, Hq, Q, D] and the keys and values [1, Hkv, K, D] of each source -> [1, Hq, Q, D], which is
        [1, Q, Hq, D] in memory. Widths of keys and values may differ."""
        from tinsmith.engine.cpu import packed

        query, sources = _rows(query), [(_rows(key), _rows(value)) for key, value in sources]
        width = sources[0][1].shape[3]
        output = query.new_empty(1, query.shape[2], query.shape[1], width).transpose(1, 2)
        work = _Pass(self, query, sources, scale)
        work.step["outputs"] = _matrix(output)
        items = len(self.calls) * work.heads
        work.run(packed.forward_function(work.is_float32), np.arange(items + 1), self._threads(work.heads))
        return output

    def backward(
        self, output_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, and in float32 those of key and value, the only source."""
        from tinsmith.engine.cpu import packed

        query, key, value, output_grad = (_rows(tensor) for tensor in (query, key, value, output_grad))
        work = _Pass(self, query, [(key, value)], scale)
        threads = self._threads(work.heads)
        query_grad = torch.empty_like(query)
        # Each thread adds to gradients of its own, so that their sum does not depend on which is first.
        grads = [
            torch.zeros(threads, 1, tensor.shape[2], tensor.shape[1], tensor.shape[3], device=tensor.device)
            for tensor in (key, value)
        ]
        grads = [grad.transpose(2, 3) for grad in grads]
        work.step["output_grads"], work.step["query_grads"] = _matrix(output_grad), _matrix(query_grad)
        for name, grad in zip(("key_grads", "value_grads"), grads, strict=True):
            work.step[name], work.step[f"{name}_part"] = _matrix(grad[0]), grad.stride(0)
        ends = np.cumsum(np.tile(self.calls["count"] * self.calls["keys"], work.heads))
        shares = np.searchsorted(ends, ends[-1] * np.arange(1, threads) / threads)
        bounds = np.array([0, *shares, len(ends)])
        work.run(packed.backward_function(work.is_float32), bounds, threads)
        key_grad, value_grad = (grad[0] if threads == 1 else grad.sum(0) for grad in grads)
        return query_grad, key_grad, value_grad

    def _threads(self, heads: int) -> int:
        scores = int((self.calls["count"] * self.calls["keys"]).sum()) * heads
        return torch.get_num_threads() if scores >= THREAD_SCORES else 1


class _Pass:
    """One call of a compiled function."""

    def __init__(
        self, calls: CompiledCalls, query: Tensor, sources: Sequence[tuple[Tensor, Tensor]], scale: float
    ) -> None:
        from tinsmith.engine.cpu import packed

        key, value = sources[0]
        self.heads, self.is_float32 = key.shape[1], KINDS[query.dtype] is float
        self._sources = np.array([tuple(map(_matrix, source)) for source in sources], packed.SOURCE)
        self.step = step = np.zeros(1, packed.PASS)
        step["calls"], step["call_table"] = len(calls.calls), calls.calls.ctypes.data
        step["runs"], step["run_table"] = len(calls.runs), calls.runs.ctypes.data
        step["sources"], step["source_table"] = len(sources), self._sources.ctypes.data
        step["keys_at_most"], step["group"] = calls.calls["keys"].max(), query.shape[1] // self.heads
        step["key_width"], step["value_width"], step["scale"] = key.shape[3], value.shape[3], scale
        step["queries"] = _matrix(query)

    def run(self, function: Any, bounds: np.ndarray, threads: int) -> None:
        """Compute the items between two bounds at a time, a key head of a call each."""
        self.step["parts"], self.step["bounds"] = len(bounds) - 1, bounds.ctypes.data
        openmp.run(function, self.step.ctypes.data, min(threads, len(bounds) - 1))


def _seen(call: AttentionCall, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [Q]: keys up to the last that each query sees; and the bool [Q, M] of the keys that some do not see among
    those."""
    count = call.stop - call.start
    if call.visible is None:
        return np.arange(keys - count + 1, keys + 1), np.zeros((count, 0), bool)
    visible = call.visible
    seen = keys - np.argmax(visible[:, ::-1], axis=1)
    before_last = np.arange(keys - visible.shape[1], keys) < seen[:, None]
    partial = np.flatnonzero((before_last & ~visible).any(0))
    return seen, np.ascontiguousarray(visible[:, partial[0] if len(partial) else visible.shape[1] :])


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with the numbers of a row side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _matrix(tensor: Tensor) -> tuple[int, int, int]:
    """`packed.MATRIX` of a tensor [1, heads, tokens, width]."""
    return tensor.data_ptr(), tensor.stride(1), tensor.stride(2)
