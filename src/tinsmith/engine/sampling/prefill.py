"""The prefill pass: only prompt tokens that are not cached go through the model.

All prompts are packed as one tree, so that common prefixes are computed once. Positions whose keys and values are in
the prefix cache are left out of the pass, unless a request needs their hidden states; the other positions attend to
them. The pass collects its keys and values, to fill the cache rows of the sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.images.rows import ImageTokens
from tinsmith.engine.model import attention, flex_attention, packing
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model.hybrid.chunk_tree import chunk_tree, parents_of
from tinsmith.engine.model.hybrid.states import HybridContext, PackedStates, RecurrentState, packed_states
from tinsmith.engine.sampling.prefixes.attention import KVIndex, KVSegment, PrefixAttention, attention_calls
from tinsmith.engine.sampling.prefixes.cache import PrefixMatch, PrefixNode


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
                layers = [segment.in_layer(layer, *layer_kv) for layer, layer_kv in enumerate(self.pass_kv)]
                for whole, parts in zip((keys, values), zip(*layers, strict=True), strict=True):
                    torch.stack(parts, out=whole[:, :, target])
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
    hidden_index: dict[int, np.ndarray]
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
    context: Any
    if not index.nodes:
        context = attention.packed_attention(
            tree, base.dtype, device, save_kv=True, flex=base.flex_attention, compiled=base.compiled_attention
        )
    elif base.flex_attention and not base.latent_width:
        context = flex_attention.FlexAttention(tree, device, save_kv=True, cached=index.cached)
    else:
        context = PrefixAttention(
            lambda window: list(attention_calls(tree, computed, index, base, window)),
            -(-len(computed) // len(ends)),
            base.dtype,
            device,
            base.compiled_attention,
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
        hidden_index={key: np.where(index.node[path] < 0, index.offset[path], 0) for key, path in tree.index.items()},
        ends={prompt.row.key: number for number, prompt in enumerate(prompts)},
        images=tuple(image.among(computed) for image in tree.images),
    )


def _states(
    prompts: Sequence[Prompt], tree: packing.PackedTree, computed: np.ndarray, taps: int, device: torch.device
) -> PackedStates:
    """Recurrent layers of the pass: every prompt starts from the state of its match, and its end state is saved."""
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


def _index_kv(prompts: Sequence[Prompt], tree: packing.PackedTree, *, to_match: bool = False) -> KVIndex:
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
    return KVIndex(nodes, node_of, offset)
