"""The attention calls of a packed pass as tables, with which a compiled function computes all of a layer's at once.

`packed` has the functions. Imports no Numba before the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.cpu import openmp
from tinsmith.engine.cpu.instructions import kind_of

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
    scores: int
    """Of all calls, for each query head."""
    most_keys: int
    """Of a call."""

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
        scores = sum((call.stop - call.start) * call.keys for call in calls)
        most = max(call.keys for call in calls)
        return cls(np.array(table, packed.CALL), np.array(runs, packed.RUN), masks, scores, most)

    def forward(self, query: Tensor, sources: Sequence[tuple[Tensor, Tensor]], scale: float) -> Tensor:
        """query [1, Hq, Q, D] and the keys and values [1, Hkv, K, D] of each source -> [1, Hq, Q, D], which is
        [1, Q, Hq, D] in memory. Widths of keys and values may differ."""
        from tinsmith.engine.cpu import packed

        query, sources = _rows(query), [(_rows(key), _rows(value)) for key, value in sources]
        key, value = sources[0]
        output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)
        items = len(self.calls) * key.shape[1]
        fields = {"outputs": _matrix(output), "bounds": np.arange(items + 1)}
        self._run(packed.forward_function, query, sources, scale, fields)
        return output

    def backward(
        self, output_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, and in float32 those of key and value, the only source."""
        from tinsmith.engine.cpu import packed

        query, key, value, output_grad = (_rows(tensor) for tensor in (query, key, value, output_grad))
        query_grad, bounds = torch.empty_like(query), self._bounds(key.shape[1])
        # Each part adds to gradients of its own, so that their sum does not depend on which thread is first.
        key_grads, value_grads = (
            torch.zeros(
                len(bounds) - 1, 1, tensor.shape[2], tensor.shape[1], tensor.shape[3], device=tensor.device
            ).transpose(2, 3)
            for tensor in (key, value)
        )
        fields = {
            "output_grads": _matrix(output_grad),
            "query_grads": _matrix(query_grad),
            "key_grads": _matrix(key_grads[0]),
            "value_grads": _matrix(value_grads[0]),
            "key_grads_part": key_grads.stride(0),
            "value_grads_part": value_grads.stride(0),
            "bounds": bounds,
        }
        self._run(packed.backward_function, query, [(key, value)], scale, fields)
        if len(bounds) == 2:
            return query_grad, key_grads[0], value_grads[0]
        return query_grad, key_grads.sum(0), value_grads.sum(0)

    def _run(
        self,
        function: Callable[[str], Any],
        query: Tensor,
        sources: Sequence[tuple[Tensor, Tensor]],
        scale: float,
        fields: dict[str, Any],
    ) -> None:
        """Call a function with a PASS of these and more fields. A thread computes the items between two bounds at a
        time; an item is a key head of a call."""
        from tinsmith.engine.cpu import packed

        key, value = sources[0]
        table = np.array([(_matrix(key), _matrix(value)) for key, value in sources], packed.SOURCE)
        bounds = fields["bounds"]
        fields = {
            "parts": len(bounds) - 1,
            "calls": len(self.calls),
            "call_table": self.calls.ctypes.data,
            "runs": len(self.runs),
            "run_table": self.runs.ctypes.data,
            "sources": len(sources),
            "source_table": table.ctypes.data,
            "keys_at_most": self.most_keys,
            "group": query.shape[1] // key.shape[1],
            "key_width": key.shape[3],
            "value_width": value.shape[3],
            "scale": scale,
            "queries": _matrix(query),
            **fields,
            "bounds": bounds.ctypes.data,
        }
        step = np.array([tuple(fields.get(name, absent) for name, absent in packed.NOTHING.items())], packed.PASS)
        threads = min(self._threads(key.shape[1]), len(bounds) - 1)
        openmp.run(function(kind_of(query.dtype)), step.ctypes.data, threads)

    def _bounds(self, heads: int) -> np.ndarray:
        """Bounds of parts of about as many scores, one for each thread."""
        threads = self._threads(heads)
        if threads == 1:
            return np.array([0, heads * len(self.calls)])
        ends = np.cumsum(np.tile(self.calls["count"] * self.calls["keys"], heads))
        return np.array([0, *np.searchsorted(ends, ends[-1] * np.arange(1, threads) / threads), len(ends)])

    def _threads(self, heads: int) -> int:
        return torch.get_num_threads() if self.scores * heads >= THREAD_SCORES else 1


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
