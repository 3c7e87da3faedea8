"""Attention of a prefill pass over itself and over cached prefixes.

Where FlexAttention serves the model, one call of it a layer computes the pass (`flex_attention.CachedKV`); these calls,
one or more for each prompt, are for CPUs and for latents. A compiled function computes all of a layer's where it can;
elsewhere each copies what it reads of the prefixes, next to its own keys and values, since products segment by segment
take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tinsmith.engine.cpu.calls import AttentionCall, CompiledCalls, KeyRun
from tinsmith.engine.model import flex_attention, packing
from tinsmith.engine.model.architectures.latents import Latents, to_cache
from tinsmith.engine.model.attention_kernels import (
    additive_mask,
    attend,
    batched_attention,
    needs_products,
)
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.sampling.prefixes.cache import PrefixNode

MAX_FOLDED_QUERIES = 128
"""Queries up to which whole score matrices are faster on a CPU than its flash kernel."""
MAX_QUERIES = 512
"""Queries of one kernel call: its mask has as many rows, so memory grows with the length only."""


@dataclass(frozen=True, slots=True)
class KVSegment:
    """Keys and values of consecutive tokens, from start to stop of a cached node or of the pass (`node` is None)."""

    node: PrefixNode | None
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def in_layer(self, layer: int, key: Tensor, value: Tensor, latents: Latents | None = None) -> tuple[Tensor, Tensor]:
        """The layer's keys and values [heads, N, width]; the pass has `key` and `value` [1, heads, C, width]."""
        keys, values = (key[0], value[0]) if self.node is None else (self.node.keys[layer], self.node.values[layer])
        keys, values = keys[:, self.start : self.stop], values[:, self.start : self.stop]
        return (keys, values) if self.node is None or latents is None else latents.keys_values(keys)


@dataclass(frozen=True, slots=True)
class KVIndex:
    """Where the keys and values of each of the tree's T positions are."""

    nodes: Sequence[PrefixNode]
    node: np.ndarray
    """int64 [T]: index into `nodes`, or -1 for the pass."""
    offset: np.ndarray
    """int64 [T]: offset in the node or in the pass."""

    def segments(self, path: np.ndarray) -> tuple[KVSegment, ...]:
        """Segments of the packed positions `path`, in order."""
        node, offset = self.node[path], self.offset[path]
        cuts = np.flatnonzero((np.diff(node) != 0) | (np.diff(offset) != 1)) + 1
        bounds = pairwise([0, *cuts.tolist(), len(path)])
        return tuple(
            KVSegment(self.nodes[node[at]] if node[at] >= 0 else None, int(offset[at]), int(offset[stop - 1]) + 1)
            for at, stop in bounds
        )

    @property
    def cached(self) -> flex_attention.CachedKV:
        """The positions that are not in the pass."""
        return flex_attention.CachedKV(np.flatnonzero(self.node >= 0), self._read)

    def _read(self, path: np.ndarray) -> list[tuple[Tensor, Tensor]]:
        """Views of the keys and values of cached positions, segment by segment."""
        return [
            (
                segment.node.keys[:, :, segment.start : segment.stop],
                segment.node.values[:, :, segment.start : segment.stop],
            )
            for segment in self.segments(path)
            if segment.node is not None
        ]


@dataclass(frozen=True, slots=True)
class PrefixCall:
    """One attention call: queries of the pass from start to stop, and all keys that any of them attends to."""

    start: int
    stop: int
    segments: tuple[KVSegment, ...]
    visible: np.ndarray | None = None
    """bool [Q, M]: whether a query sees each of the last M keys, as in `AttentionCall`."""

    @property
    def keys(self) -> int:
        return sum(segment.length for segment in self.segments)


@dataclass(frozen=True, slots=True)
class _CompiledPrefixCalls:
    calls: CompiledCalls
    nodes: Sequence[PrefixNode]
    """The sources after the pass itself, which is the first."""

    @classmethod
    def of(cls, calls: Sequence[PrefixCall]) -> _CompiledPrefixCalls:
        segments = [segment for call in calls for segment in call.segments]
        nodes = list({id(part.node): part.node for part in segments if part.node is not None}.values())
        numbers = {id(node): 1 + number for number, node in enumerate(nodes)}
        with_runs = [
            AttentionCall(
                call.start,
                call.stop,
                tuple(KeyRun(part.start, part.stop, numbers.get(id(part.node), 0)) for part in call.segments),
                call.visible,
            )
            for call in calls
        ]
        return cls(CompiledCalls.of(with_runs), nodes)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """As `AttentionContext.attend`."""
        cached = [(node.keys[layer][None], node.values[layer][None]) for node in self.nodes]
        return self.calls.forward(query, [(key, value), *cached], rule.scale).transpose(1, 2)


@dataclass(slots=True)
class PrefixAttention:
    """Attention of the pass over itself and cached prefixes; collects keys and values as `PackedAttention` does."""

    calls_in_window: Callable[[int | None], list[PrefixCall]]
    cached_queries: int
    dtype: torch.dtype
    device: torch.device
    compiled: bool = False
    """Whether compiled functions compute what they can, on a CPU."""
    saved_kv: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _calls: dict[int | None, list[tuple[PrefixCall, Tensor]]] = field(default_factory=dict)
    """By window: layers with the same window share the masks."""
    _compiled_calls: dict[int | None, _CompiledPrefixCalls] = field(default_factory=dict)

    def calls(self, window: int | None) -> list[tuple[PrefixCall, Tensor]]:
        """The calls of layers with this window, with their masks."""
        if window not in self._calls:
            self._calls[window] = list(_with_masks(self.calls_in_window(window), self.dtype, self.device))
        return self._calls[window]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, latents: Latents | None = None
    ) -> Tensor:
        """query [1, Hq, C, D], key and value [1, Hkv, C, D] -> [1, C, Hq, D]."""
        self.saved_kv.append(to_cache(key, value, latents))
        if self.compiled and self.device.type == "cpu" and rule.is_softmax and latents is None:
            if rule.window not in self._compiled_calls:
                self._compiled_calls[rule.window] = _CompiledPrefixCalls.of(self.calls_in_window(rule.window))
            return self._compiled_calls[rule.window].attend(layer, query, key, value, rule)
        output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        products = needs_products(rule, query.device) or (latents is not None and latents.absorbs)
        for call, mask in self.calls(rule.window):
            parts = zip(*(segment.in_layer(layer, key, value, latents) for segment in call.segments), strict=True)
            keys, values = (tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1) for tensors in parts)
            own = query[:, :, call.start : call.stop]
            if products or (query.device.type == "cpu" and call.stop - call.start <= MAX_FOLDED_QUERIES):
                attended = batched_attention(own, keys[None], values[None], mask, rule)
            else:
                unmasked = keys.shape[1] - mask.shape[1]
                whole = pad(mask, (unmasked, 0)) if unmasked else mask
                attended = attend(own, keys[None], values[None], whole.contiguous(), rule)
            output[:, call.start : call.stop] = attended.transpose(1, 2)
        return output


def attention_calls(
    tree: packing.PackedTree, computed: np.ndarray, index: KVIndex, base: BaseModel, window: int | None
) -> Iterator[PrefixCall]:
    """The calls for the positions `computed` [C] of a tree, in layers with this window, without masks."""
    # Compiled functions and products, which bfloat16 takes on a CPU, compute short calls faster than long ones.
    short = base.device.type == "cpu" and (base.compiled_attention or base.dtype == torch.bfloat16)
    max_queries = MAX_FOLDED_QUERIES if short else MAX_QUERIES
    for job in tree.jobs:
        start, stop = (int(bound) for bound in np.searchsorted(computed, [job.start, job.stop]))
        if start == stop:
            continue
        path = np.concatenate([np.arange(*span) for span in (*job.prefix, (job.start, job.stop))])
        depth = len(path) - (job.stop - job.start)
        depths = np.concatenate([np.arange(depth), tree.positions[job.start : job.stop]])
        if job.mask is not None and job.stop - job.start <= packing.MAX_MERGED_QUERIES:
            visible = job.mask[computed[start:stop] - job.start]
            if window is not None and int(depths.max()) >= window:
                yield _windowed_call(start, visible, tree.positions[computed[start:stop]], depths, window, path, index)
                continue
            keys, visible = _trim_mask(visible)
            yield PrefixCall(start, stop, index.segments(path[:keys]), visible)
            continue
        # A longer job belongs to one row: its queries attend to the whole prefix and to their own past.
        for low, high in packing.contiguous_runs(computed[start:stop]):
            for first in range(low, high, max_queries):
                last = min(first + max_queries, high)
                count, keys = last - first, depth + last - job.start
                begin = int(index.offset[first])
                if window is not None and keys > window:
                    visible = np.tri(count, keys, keys - count, dtype=bool)
                    yield _windowed_call(begin, visible, depths[keys - count : keys], depths, window, path, index)
                    continue
                yield PrefixCall(begin, begin + count, index.segments(path[:keys]))


def _with_masks(
    calls: Sequence[PrefixCall], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[PrefixCall, Tensor]]:
    """The calls, each with its additive mask [Q, M] over the last M keys; every query attends to those before."""
    causal = [call for call in calls if call.visible is None]
    rows = max((call.stop - call.start for call in causal), default=0)
    longest = max((call.keys for call in causal), default=0)
    # Causal mask of the last queries of the longest call: the masks of all calls without branches are parts of it.
    whole = additive_mask(np.tri(rows, longest, longest - rows, dtype=bool), dtype, device)
    for call in calls:
        if call.visible is not None:
            yield call, additive_mask(call.visible, dtype, device)
        else:
            count = call.stop - call.start
            folded = device.type == "cpu" and count <= MAX_FOLDED_QUERIES
            yield call, whole[rows - count :, longest - (count if folded else call.keys) :]


def _windowed_call(
    start: int,
    visible: np.ndarray,
    positions: np.ndarray,
    depths: np.ndarray,
    window: int,
    path: np.ndarray,
    index: KVIndex,
) -> PrefixCall:
    """The call of the queries from `start` on, at these positions, over the keys within the window alone.

    `visible` is bool [Q, K] without a window; `depths` and `path` are the keys' positions in their row and in the tree.
    """
    visible = visible & (positions[:, None] - depths[None, : visible.shape[1]] < window)
    first, last = np.flatnonzero(visible.any(0))[[0, -1]].tolist()
    return PrefixCall(start, start + len(visible), index.segments(path[first : last + 1]), visible[:, first : last + 1])


def _trim_mask(allowed: np.ndarray) -> tuple[int, np.ndarray]:
    """bool [Q, K] -> number of keys that any query sees, and the mask [Q, M] from the first key that not all see."""
    keys = int(np.flatnonzero(allowed.any(0))[-1]) + 1
    partial = np.flatnonzero(~allowed[:, :keys].all(0))
    return keys, allowed[:, int(partial[0]) if partial.size else keys : keys]
