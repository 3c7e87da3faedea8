"""Attention of a prefill pass over itself and over cached prefixes.

Where FlexAttention serves the model, one call of it a layer computes the pass (`flex_attention.CachedKV`); these calls,
one or more for each prompt, are for CPUs and for latents. Each copies what it reads of the prefixes, next to its own
keys and values: products segment by segment take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

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
class _AttentionCall:
    """One attention call: queries of the pass from start to stop, and all keys that any of them attends to."""

    start: int
    stop: int
    segments: tuple[KVSegment, ...]
    mask: Tensor
    """Additive [Q, M] over the last M keys; every query attends to those before."""


@dataclass(slots=True)
class PrefixAttention:
    """Attention of the pass over itself and cached prefixes; collects keys and values as `PackedAttention` does."""

    calls_in_window: Callable[[int | None], list[_AttentionCall]]
    cached_queries: int
    saved_kv: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _calls: dict[int | None, list[_AttentionCall]] = field(default_factory=dict)
    """By window: layers with the same window share the masks."""

    def calls(self, window: int | None) -> list[_AttentionCall]:
        """The calls of layers with this window."""
        if window not in self._calls:
            self._calls[window] = self.calls_in_window(window)
        return self._calls[window]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, latents: Latents | None = None
    ) -> Tensor:
        """query [1, Hq, C, D], key and value [1, Hkv, C, D] -> [1, C, Hq, D]."""
        self.saved_kv.append(to_cache(key, value, latents))
        output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        products = needs_products(rule, query.device) or (latents is not None and latents.absorbs)
        for call in self.calls(rule.window):
            parts = zip(*(segment.in_layer(layer, key, value, latents) for segment in call.segments), strict=True)
            keys, values = (tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1) for tensors in parts)
            own, mask = query[:, :, call.start : call.stop], call.mask
            if products or (query.device.type == "cpu" and call.stop - call.start <= MAX_FOLDED_QUERIES):
                attended = batched_attention(own, keys[None], values[None], mask, rule)[0]
            else:
                if unmasked := keys.shape[1] - mask.shape[1]:
                    mask = pad(mask, (unmasked, 0))
                attended = attend(own, keys[None], values[None], mask.contiguous(), rule)
            output[:, call.start : call.stop] = attended.transpose(1, 2)
        return output


def attention_calls(
    tree: packing.PackedTree, computed: np.ndarray, index: KVIndex, base: BaseModel, window: int | None
) -> Iterator[_AttentionCall]:
    """The calls for the positions `computed` [C] of a tree, in layers with this window."""
    cpu = base.device.type == "cpu"
    # In bfloat16 on a CPU, plain products are much faster than the flash kernel, so long calls are cut to use them.
    max_queries = MAX_FOLDED_QUERIES if cpu and base.dtype == torch.bfloat16 else MAX_QUERIES
    longest = max(len(path) for path in tree.index.values())
    rows = min(max_queries, len(computed))
    # Causal mask of the last queries of the longest sequence: the masks of all calls without branches are parts of it.
    causal = additive_mask(np.tri(rows, longest, longest - rows, dtype=bool), base.dtype, base.device)
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
                yield _windowed_call(
                    start, visible, tree.positions[computed[start:stop]], depths, window, path, index, base
                )
                continue
            keys, mask = _trim_mask(visible)
            mask = additive_mask(mask, base.dtype, base.device)
            yield _AttentionCall(start, stop, index.segments(path[:keys]), mask)
            continue
        # A longer job belongs to one row: its queries attend to the whole prefix and to their own past.
        for low, high in packing.contiguous_runs(computed[start:stop]):
            for first in range(low, high, max_queries):
                last = min(first + max_queries, high)
                count, keys = last - first, depth + last - job.start
                begin = int(index.offset[first])
                if window is not None and keys > window:
                    visible = np.tri(count, keys, keys - count, dtype=bool)
                    yield _windowed_call(begin, visible, depths[keys - count : keys], depths, window, path, index, base)
                    continue
                mask = causal[rows - count :, longest - (count if cpu and count <= MAX_FOLDED_QUERIES else keys) :]
                yield _AttentionCall(begin, begin + count, index.segments(path[:keys]), mask)


def _windowed_call(
    start: int,
    visible: np.ndarray,
    positions: np.ndarray,
    depths: np.ndarray,
    window: int,
    path: np.ndarray,
    index: KVIndex,
    base: BaseModel,
) -> _AttentionCall:
    """The call of the queries from `start` on, at these positions, over the keys within the window alone.

    `visible` is bool [Q, K] without a window; `depths` and `path` are the keys' positions in their row and in the tree.
    """
    visible = visible & (positions[:, None] - depths[None, : visible.shape[1]] < window)
    first, last = np.flatnonzero(visible.any(0))[[0, -1]].tolist()
    mask = additive_mask(visible[:, first : last + 1], base.dtype, base.device)
    return _AttentionCall(start, start + len(visible), index.segments(path[first : last + 1]), mask)


def _trim_mask(allowed: np.ndarray) -> tuple[int, np.ndarray]:
    """bool [Q, K] -> number of keys that any query sees, and the mask [Q, M] from the first key that not all see."""
    keys = int(np.flatnonzero(allowed.any(0))[-1]) + 1
    partial = np.flatnonzero(~allowed[:, :keys].all(0))
    return keys, allowed[:, int(partial[0]) if partial.size else keys : keys]
