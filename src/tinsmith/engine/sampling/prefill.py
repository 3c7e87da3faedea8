"""The prefill pass: only prompt tokens that are not cached go through the model.

All prompts are packed as one tree, so that common prefixes are computed once. Positions whose keys and values are in
the prefix cache are left out of the pass, unless a request needs their hidden states; the other positions attend to
them in place, without a copy. Keys and values of the pass are to_cache, to fill the cache rows of the sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.images.rows import ImageTokens
from tinsmith.engine.model import attention, flex_attention, packing
from tinsmith.engine.model.architectures.latents import Latents, to_cache
from tinsmith.engine.model.attention_kernels import (
    additive_mask,
    attend,
    cap_scores,
    needs_products,
    softmax_with_sinks,
)
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model.hybrid.chunk_tree import chunk_tree, parents_of
from tinsmith.engine.model.hybrid.states import HybridContext, PackedStates, RecurrentState, packed_states
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

    def in_layer(self, layer: int, key: Tensor, value: Tensor, latents: Latents | None = None) -> tuple[Tensor, Tensor]:
        """The layer's keys and values [heads, N, width]; the pass has `key` and `value` [1, heads, C, width]."""
        keys, values = (key[0], value[0]) if self.node is None else (self.node.keys[layer], self.node.values[layer])
        keys, values = keys[:, self.start : self.stop], values[:, self.start : self.stop]
        return (keys, values) if self.node is None or latents is None else latents.keys_values(keys)


@dataclass(frozen=True, slots=True)
class PrefilledPrompt:
    """A prompt after prefill: its last hidden state [D], and where its keys and values are."""

    last_hidden: Tensor
    segments: tuple[KVSegment, ...]
    pass_kv: Sequence[tuple[Tensor, Tensor]] = ()
    """Keys and values of the pass, layer by layer [1, heads, C, width]."""
    state: RecurrentState | None = None
    """State of the recurrent layers at its end, if the model has any."""
    pass_routed_experts: np.ndarray | None = None
    """The record [C, layers, k] of the pass's experts, if it was recorded."""

    @classmethod
    def from_cache(cls, match: PrefixMatch) -> PrefilledPrompt:
        """A prompt that is completely in the prefix cache."""
        assert match.last_hidden is not None
        segments = tuple(KVSegment(node, 0, count) for node, count in match.path)
        return cls(match.last_hidden, segments, state=match.state)

    @property
    def length(self) -> int:
        return sum(segment.length for segment in self.segments)

    def head(self, length: int) -> PrefilledPrompt:
        """The first tokens of the prompt, for their keys and values."""
        segments, left = list[KVSegment](), length
        for segment in self.segments:
            segments.append(replace(segment, stop=segment.start + min(segment.length, left)))
            left -= segments[-1].length
        return replace(self, segments=tuple(segments), state=None)

    def routed_experts(self) -> np.ndarray | None:
        """The record [N, layers, k] of the prompt's experts, if all of it was recorded."""
        records = [
            self.pass_routed_experts if part.node is None else part.node.routed_experts for part in self.segments
        ]
        parts = zip(records, self.segments, strict=True)
        present = [record[segment.start : segment.stop] for record, segment in parts if record is not None]
        return np.concatenate(present) if len(present) == len(records) else None

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
        size = (len(self.pass_kv), self.pass_kv[0][0].shape[1], self.length - first)
        keys, values = (tensor.new_empty(*size, tensor.shape[3]) for tensor in self.pass_kv[0])
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
    """int64 [C], or [3, C] in a pass with images, for rotary embeddings."""
    spans: tuple[packing.AdapterSpan, ...]
    context: attention.PackedAttention | flex_attention.FlexAttention | PrefixAttention | HybridContext
    segments: dict[int, tuple[KVSegment, ...]]
    """Row key -> where the row's keys and values are."""
    hidden_index: dict[int, Tensor]
    """Row key -> int64 [N]: index of each position in the pass; 0 for positions that are not in it."""
    ends: dict[int, int]
    """Row key -> number of the state at its end, in a model with recurrent layers."""
    images: tuple[ImageTokens, ...] = ()

    def state(self, key: int) -> RecurrentState | None:
        """The state at the end of a row, after the pass; None in a model without recurrent layers."""
        return self.context.recurrent.state(self.ends[key]) if isinstance(self.context, HybridContext) else None


def prefill_pass(prompts: Sequence[Prompt], base: BaseModel) -> PrefillPass:
    """The pass over these prompts."""
    tree, device = packing.pack([prompt.row for prompt in prompts]), base.device
    index = _index_kv(prompts, tree, to_match=base.recurrent is not None)
    computed = np.flatnonzero(index.node < 0)
    spans = [
        packing.AdapterSpan(adapter=span.adapter, start=int(start), stop=int(stop))
        for span in tree.spans
        for start, stop in [np.searchsorted(computed, [span.start, span.stop])]
    ]
    ends = {id(prompt.match.path[-1][0]) for prompt in prompts if prompt.match.path}
    context: Any = (
        PrefixAttention(
            lambda window: list(_attention_calls(tree, computed, index, base, window)), -(-len(computed) // len(ends))
        )
        if index.nodes
        else attention.packed_attention(tree, base.dtype, device, save_kv=True)
    )
    if base.recurrent is not None:
        states = _states(prompts, tree, computed, base.recurrent.taps, device)
        context = HybridContext(base.recurrent, context, states)
    return PrefillPass(
        tokens=torch.as_tensor(tree.tokens[computed], device=device),
        positions=torch.as_tensor(
            tree.positions[computed] if tree.rotary is None else tree.rotary[..., computed], device=device
        ),
        spans=tuple(spans),
        context=context,
        segments={key: index.segments(path) for key, path in tree.index.items()},
        hidden_index={
            key: torch.as_tensor(np.where(index.node[path] < 0, index.offset[path], 0), device=device)
            for key, path in tree.index.items()
        },
        ends={prompt.row.key: number for number, prompt in enumerate(prompts)},
        images=tuple(image.among(computed) for image in tree.images),
    )


def _states(
    prompts: Sequence[Prompt], tree: packing.PackedTree, computed: np.ndarray, taps: int, device: torch.device
) -> PackedStates:
    """Recurrent layers of the pass: every prompt starts from the state of its match, and its end state is to_cache."""
    number = np.full(len(tree.tokens), -1)
    number[computed] = np.arange(len(computed))
    parents = parents_of(tree)[computed]
    starts, outside = dict[int, int](), list[RecurrentState]()
    for prompt in prompts:
        if prompt.match.state is not None:
            first = int(number[tree.index[prompt.row.key][prompt.match.length]])
            if first not in starts:
                starts[first] = len(outside)
                outside.append(prompt.match.state)
    ends = [int(number[tree.index[prompt.row.key][-1]]) for prompt in prompts]
    chunks = chunk_tree(np.where(parents < 0, -1, number[parents]), taps, starts=starts, ends=ends)
    return packed_states(chunks, device, outside, saves=True)


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
        bounds = pairwise([0, *cuts.tolist(), len(path)])
        return tuple(
            KVSegment(self.nodes[node[at]] if node[at] >= 0 else None, int(offset[at]), int(offset[stop - 1]) + 1)
            for at, stop in bounds
        )


def _index_kv(prompts: Sequence[Prompt], tree: packing.PackedTree, *, to_match: bool = False) -> _KVIndex:
    """Assign each position to a cached node, or to the pass if it is not cached or its hidden state is needed.

    With `to_match`, all of a prompt after its own match is in the pass, because recurrent layers start there.
    """
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
        first = prompt.match.length if to_match else prompt.first_hidden
        node_of[tree.index[prompt.row.key][first:]] = -1
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
            keys_values = [segment.in_layer(layer, key, value, latents) for segment in call.segments]
            folded = products or (query.device.type == "cpu" and call.stop - call.start <= MAX_FOLDED_QUERIES)
            compute = _attend_folded if folded else _attend_fused
            attended = compute(query[0, :, call.start : call.stop], keys_values, call.mask, rule)
            output[0, call.start : call.stop] = attended.transpose(0, 1)
        return output


def _attention_calls(
    tree: packing.PackedTree, computed: np.ndarray, index: _KVIndex, base: BaseModel, window: int | None
) -> Iterator[_AttentionCall]:
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
    index: _KVIndex,
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


KeysAndValues = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [Hkv, K, D] of each segment."""


def _attend_fused(query: Tensor, keys_values: KeysAndValues, mask: Tensor, rule: AttentionRule) -> Tensor:
    """query [Hq, Q, D] -> [Hq, Q, D], by one call of the kernel."""
    key, value = (torch.cat(parts, dim=1)[None] for parts in zip(*keys_values, strict=True))
    if unmasked := key.shape[2] - mask.shape[1]:
        mask = torch.nn.functional.pad(mask, (unmasked, 0))
    return attend(query[None], key, value, mask.contiguous(), rule)[0]


def _attend_folded(query: Tensor, keys_values: KeysAndValues, mask: Tensor, rule: AttentionRule) -> Tensor:
    """The same by plain products, segment by segment: query heads that share a key head are rows of one matrix."""
    heads, length = len(keys_values[0][0]), query.shape[1]
    folded = (query * rule.scale).reshape(heads, -1, query.shape[2])
    scores = torch.cat([torch.bmm(folded, key.transpose(1, 2)) for key, _ in keys_values], dim=2)
    scores, keys = cap_scores(scores, rule), scores.shape[2]
    scores.view(heads, -1, length, keys)[..., keys - mask.shape[1] :] += mask
    probs = torch.softmax(scores, -1, out=scores) if rule.sinks is None else softmax_with_sinks(scores, rule.sinks)
    parts = probs.split([key.shape[1] for key, _ in keys_values], dim=2)
    output = torch.bmm(parts[0], keys_values[0][1])
    for segment_probs, (_, value) in zip(parts[1:], keys_values[1:], strict=True):
        output.baddbmm_(segment_probs, value)
    return output.view(-1, length, output.shape[2])
