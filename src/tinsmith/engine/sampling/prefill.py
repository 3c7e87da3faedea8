"""The prefill pass: only prompt tokens that are not cached go through the model.

All prompts are packed as one tree, so that common prefixes are computed once. Positions whose keys and values are in
the prefix cache are left out of the pass, unless a request needs their hidden states; the other positions attend to
them in place, without a copy. Keys and values of the pass are kept, to fill the cache rows of the sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.model import attention, flex_attention, packing
from tinsmith.engine.model.loading import BaseModel
from tinsmith.engine.sampling.prefix_cache import PrefixMatch, PrefixNode

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

    def in_layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values [heads, N, width]. The pass has `key` and `value` [1, heads, C, width]."""
        keys, values = (key[0], value[0]) if self.node is None else (self.node.keys[layer], self.node.values[layer])
        return keys[:, self.start : self.stop], values[:, self.start : self.stop]


@dataclass(frozen=True, slots=True)
class PrefilledPrompt:
    """A prompt after prefill: its last hidden state [D], and where its keys and values are."""

    last_hidden: Tensor
    segments: tuple[KVSegment, ...]
    pass_kv: Sequence[tuple[Tensor, Tensor]] = ()
    """Keys and values of the pass, layer by layer [1, heads, C, width]."""

    @classmethod
    def from_cache(cls, match: PrefixMatch) -> PrefilledPrompt:
        """A prompt that is completely in the prefix cache."""
        assert match.last_hidden is not None
        return cls(match.last_hidden, tuple(KVSegment(node, 0, count) for node, count in match.path))

    @property
    def length(self) -> int:
        return sum(segment.length for segment in self.segments)

    def write(self, keys: Tensor, values: Tensor, first: int = 0) -> None:
        """Copy keys and values from position `first` on into tensors [layers, heads, N, width]."""
        start = 0
        for segment in self._segments_from(first):
            target = slice(start, start + segment.length)
            if segment.node is not None:
                keys[:, :, target] = segment.node.keys[:, :, segment.start : segment.stop]
                values[:, :, target] = segment.node.values[:, :, segment.start : segment.stop]
            else:
                for layer, layer_kv in enumerate(self.pass_kv):
                    keys[layer, :, target], values[layer, :, target] = segment.in_layer(layer, *layer_kv)
            start = target.stop

    def copy_from(self, first: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values from position `first` on. Part of the prompt must have been in the pass."""
        _, heads, _, width = self.pass_kv[0][0].shape
        size = (len(self.pass_kv), heads, self.length - first, width)
        keys, values = self.pass_kv[0][0].new_empty(size), self.pass_kv[0][1].new_empty(size)
        self.write(keys, values, first)
        return keys, values

    def _segments_from(self, first: int) -> Iterator[KVSegment]:
        for segment in self.segments:
            skipped = min(first, segment.length)
            first -= skipped
            if skipped < segment.length:
                yield KVSegment(segment.node, segment.start + skipped, segment.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of the pass."""

    row: packing.PackedRow
    match: PrefixMatch
    first_hidden: int
    """The first position whose hidden state is needed; `match` does not extend beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPass:
    """Inputs of the pass: C of the tree's T packed positions."""

    tokens: Tensor
    """int32 [C]."""
    positions: Tensor
    """int64 [C]."""
    spans: tuple[packing.AdapterSpan, ...]
    context: attention.PackedAttention | flex_attention.FlexAttention | PrefixAttention
    segments: dict[int, tuple[KVSegment, ...]]
    """Row key -> where the row's keys and values are."""
    hidden_index: dict[int, Tensor]
    """Row key -> int64 [N]: index of each position in the pass; 0 for positions that are not in it."""


def prefill_pass(prompts: Sequence[Prompt], base: BaseModel) -> PrefillPass:
    """The pass over these prompts."""
    tree, device = packing.pack([prompt.row for prompt in prompts]), base.device
    index = _index_kv(prompts, tree)
    computed = np.flatnonzero(index.node < 0)
    spans = [
        packing.AdapterSpan(adapter=span.adapter, start=int(start), stop=int(stop))
        for span in tree.spans
        for start, stop in [np.searchsorted(computed, [span.start, span.stop])]
    ]
    return PrefillPass(
        tokens=torch.as_tensor(tree.tokens[computed], device=device),
        positions=torch.as_tensor(tree.positions[computed], device=device),
        spans=tuple(spans),
        context=PrefixAttention(list(_attention_calls(tree, computed, index, base)))
        if index.nodes
        else attention.packed_attention(tree, base.dtype, device, save_kv=True),
        segments={key: index.segments(path) for key, path in tree.index.items()},
        hidden_index={
            key: torch.as_tensor(np.where(index.node[path] < 0, index.offset[path], 0), device=device)
            for key, path in tree.index.items()
        },
    )


@dataclass(frozen=True, slots=True)
class _KVIndex:
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
        return tuple(
            KVSegment(
                self.nodes[node[start]] if node[start] >= 0 else None, int(offset[start]), int(offset[stop - 1]) + 1
            )
            for start, stop in pairwise([0, *cuts.tolist(), len(path)])
        )


def _index_kv(prompts: Sequence[Prompt], tree: packing.PackedTree) -> _KVIndex:
    """Assign each position to a cached node, or to the pass if it is not cached or its hidden state is needed."""
    nodes, numbers = list[PrefixNode](), dict[int, int]()
    node_of, offset = np.full(len(tree.tokens), -1), np.zeros(len(tree.tokens), np.int64)
    for prompt in prompts:
        first = 0
        for node, count in prompt.match.path:
            if id(node) not in numbers:
                numbers[id(node)] = len(nodes)
                nodes.append(node)
            positions = tree.index[prompt.row.key][first : first + count]
            node_of[positions], offset[positions] = numbers[id(node)], np.arange(count)
            first += count
    for prompt in prompts:
        node_of[tree.index[prompt.row.key][prompt.first_hidden :]] = -1
    computed = node_of < 0
    offset[computed] = np.arange(int(computed.sum()))
    return _KVIndex(nodes, node_of, offset)


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
    """Attention of the pass over itself and the cached prefixes. Collects the keys and values of the pass, as
    `attention.PackedAttention` does."""

    calls: Sequence[_AttentionCall]
    saved_kv: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [1, Hq, C, D], key and value [1, Hkv, C, D] -> [1, C, Hq, D]."""
        self.saved_kv.append((key, value))
        output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        for call in self.calls:
            keys_values = [segment.in_layer(layer, key, value) for segment in call.segments]
            folded = query.device.type == "cpu" and call.stop - call.start <= MAX_FOLDED_QUERIES
            attend = _attend_folded if folded else _attend_fused
            attended = attend(query[0, :, call.start : call.stop], keys_values, call.mask, scale)
            output[0, call.start : call.stop] = attended.transpose(0, 1)
        return output


def _attention_calls(
    tree: packing.PackedTree, computed: np.ndarray, index: _KVIndex, base: BaseModel
) -> Iterator[_AttentionCall]:
    cpu = base.device.type == "cpu"
    # In bfloat16 on a CPU, plain products are much faster than the flash kernel, so long calls are cut to use them.
    max_queries = MAX_FOLDED_QUERIES if cpu and base.dtype == torch.bfloat16 else MAX_QUERIES
    longest = max(len(path) for path in tree.index.values())
    rows = min(max_queries, len(computed))
    # Causal mask of the last queries of the longest sequence: the masks of all calls without branches are parts of it.
    causal = attention.additive_mask(np.tri(rows, longest, longest - rows, dtype=bool), base.dtype, base.device)
    for job in tree.jobs:
        start, stop = (int(bound) for bound in np.searchsorted(computed, [job.start, job.stop]))
        if start == stop:
            continue
        path = np.concatenate([np.arange(*span) for span in (*job.prefix, (job.start, job.stop))])
        depth = len(path) - (job.stop - job.start)
        if job.mask is not None and job.stop - job.start <= packing.MAX_MERGED_QUERIES:
            keys, mask = _trim_mask(job.mask[computed[start:stop] - job.start])
            mask = attention.additive_mask(mask, base.dtype, base.device)
            yield _AttentionCall(start, stop, index.segments(path[:keys]), mask)
            continue
        # A longer job belongs to one row: its queries attend to the whole prefix and to their own past.
        for low, high in packing.contiguous_runs(computed[start:stop]):
            for first in range(low, high, max_queries):
                last = min(first + max_queries, high)
                count, keys = last - first, depth + last - job.start
                begin = int(index.offset[first])
                mask = causal[rows - count :, longest - (count if cpu and count <= MAX_FOLDED_QUERIES else keys) :]
                yield _AttentionCall(begin, begin + count, index.segments(path[:keys]), mask)


def _trim_mask(allowed: np.ndarray) -> tuple[int, np.ndarray]:
    """bool [Q, K] -> the number of keys that any query attends to, and the mask [Q, M] of the last M of them, from the
    first key on to which not all queries attend."""
    keys = int(np.flatnonzero(allowed.any(0))[-1]) + 1
    partial = np.flatnonzero(~allowed[:, :keys].all(0))
    return keys, allowed[:, int(partial[0]) if partial.size else keys : keys]


KeysAndValues = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [Hkv, K, D] of each segment."""


def _attend_fused(query: Tensor, keys_values: KeysAndValues, mask: Tensor, scale: float) -> Tensor:
    """query [Hq, Q, D] -> [Hq, Q, D], by one call of the kernel."""
    key, value = (torch.cat(parts, dim=1)[None] for parts in zip(*keys_values, strict=True))
    if unmasked := key.shape[2] - mask.shape[1]:
        mask = torch.nn.functional.pad(mask, (unmasked, 0))
    return attention.attend(query[None], key, value, mask.contiguous(), scale)[0]


def _attend_folded(query: Tensor, keys_values: KeysAndValues, mask: Tensor, scale: float) -> Tensor:
    """The same by plain products, segment by segment: query heads that share a key head are rows of one matrix."""
    heads, length = len(keys_values[0][0]), query.shape[1]
    folded = (query * scale).reshape(heads, -1, query.shape[2])
    scores = torch.cat([torch.bmm(folded, key.transpose(1, 2)) for key, _ in keys_values], dim=2)
    keys = scores.shape[2]
    scores.view(heads, -1, length, keys)[..., keys - mask.shape[1] :] += mask
    probs = torch.softmax(scores, -1, out=scores).split([key.shape[1] for key, _ in keys_values], dim=2)
    output = torch.bmm(probs[0], keys_values[0][1])
    for segment_probs, (_, value) in zip(probs[1:], keys_values[1:], strict=True):
        output.baddbmm_(segment_probs, value)
    return output.view(-1, length, query.shape[2])
