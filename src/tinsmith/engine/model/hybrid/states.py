"""States of recurrent layers, and the context of a pass through a model that has attention and recurrent layers.

Such a model keeps keys and values for its attention layers only, so the context numbers these 0, 1, ... for attention.
Recurrent layers take their part of the pass from `recurrent`: `PackedStates` in a packed pass, the sampler's states in
a decoding step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from tinsmith.engine.model.architectures.latents import Latents
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.hybrid.chunk_rule import ChunkRule, HeadShape, chunk_rule
from tinsmith.engine.model.hybrid.chunk_tensors import ChunkTensors
from tinsmith.engine.model.hybrid.chunk_tree import ChunkTree, chunk_tree, parents_of
from tinsmith.engine.model.hybrid.convolution import convolve_chunks, input_table
from tinsmith.engine.model.packing import PackedTree

MAX_KEPT_BYTES = 256 * 2**20
"""Of the recurrence in a pass: below, a backward finds it in memory, which then takes half the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """Which layers of a model are recurrent, and the shapes of their states."""

    attention_layers: Mapping[int, int]
    """Number among the attention layers, by layer."""
    recurrent_layers: Mapping[int, int]
    """Number among the recurrent layers, by layer."""
    state: tuple[int, int, int]
    """Value heads, key width, value width: float32."""
    taps: int
    """Tokens that the convolution reads, its own included."""
    channels: int
    """Inputs of the convolution: of the model's dtype."""

    @property
    def conv(self) -> tuple[int, int]:
        """Shape of the convolution's state: its last inputs, newest last."""
        return self.taps - 1, self.channels

    def slot_bytes(self, size: int) -> int:
        """About the bytes that all layers keep of a slot in chunks of `size`, if a backward computes nothing again."""
        heads, keys, values = self.state
        return (
            len(self.recurrent_layers)
            * 4
            * (2 * self.channels + heads * (4 * size + 3 * keys + 8 * values + keys * values // size))
        )

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one row's states in all layers."""
        heads, keys, values = self.state
        conv = (self.taps - 1) * self.channels * dtype.itemsize
        return len(self.recurrent_layers) * (heads * keys * values * 4 + conv)


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The states of one row after some token: [layers, Hv, dk, dv] and [layers, taps - 1, channels]."""

    recurrent: Tensor
    conv: Tensor

    def clone(self) -> RecurrentState:
        """A copy, independent of the pass that made the state."""
        return RecurrentState(self.recurrent.clone(), self.conv.clone())


@dataclass(frozen=True, slots=True)
class MixerInputs:
    """Projections of C tokens, as the recurrence of a layer reads them."""

    mixed: Tensor
    """Queries, keys and values before the convolution [C, channels]."""
    decay: Tensor
    """[C, Hv], float32, <= 0."""
    beta: Tensor
    """[C, Hv]."""
    conv_weight: Tensor
    """[channels, taps]."""
    key_heads: int
    key_width: int
    rule: ChunkRule = chunk_rule
    """Of the tokens of a pass."""

    @property
    def shape(self) -> HeadShape:
        """Heads and widths of the layer."""
        values = self.mixed.shape[1] - 2 * self.key_heads * self.key_width
        return HeadShape(self.key_heads, self.key_width, self.decay.shape[1], values // self.decay.shape[1])

    def heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [C, Hk, dk], and values [C, Hv, dv]."""
        keys = self.key_heads * self.key_width
        query, key, value = convolved.split([keys, keys, convolved.shape[1] - 2 * keys], 1)
        query, key = (part.unflatten(1, (self.key_heads, -1)) for part in (query, key))
        return query, key, value.unflatten(1, (self.decay.shape[1], -1))


class RecurrentContext(Protocol):
    """Recurrent layers of one forward pass: which token each token continues."""

    def mix(self, layer: int, inputs: MixerInputs) -> Tensor:
        """Outputs [C, Hv, dv] of a layer, by its number among the recurrent layers."""
        ...


@dataclass(slots=True)
class PackedStates:
    """Recurrent layers over a packed tree."""

    tree: ChunkTensors
    outside: Sequence[RecurrentState] = ()
    """States from which tokens of the pass start."""
    saves: bool = False
    """Whether the states at the tree's ends are kept."""
    recomputes: bool = True
    """Whether a backward computes the recurrence again, instead of keeping all of it."""
    saved: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of each layer: recurrent [ends, Hv, dk, dv] and conv [ends, taps - 1, channels]."""

    def mix(self, layer: int, inputs: MixerInputs) -> Tensor:
        """As `RecurrentContext.mix`."""
        outside = torch.cat([state.conv[layer] for state in self.outside]) if self.outside else None
        convolved = convolve_chunks(inputs.mixed, inputs.conv_weight, self.tree, outside)
        before = torch.stack([state.recurrent[layer] for state in self.outside]) if self.outside else None
        output, states = inputs.rule(convolved, inputs.decay, inputs.beta, inputs.shape, self.tree, before)
        if self.saves:
            self.saved.append((states, input_table(inputs.mixed, outside)[self.tree.end_taps]))
        return output

    def state(self, end: int) -> RecurrentState:
        """The state at an end of the tree, after the pass."""
        recurrent, conv = zip(*self.saved, strict=True)
        return RecurrentState(
            torch.stack([states[end] for states in recurrent]), torch.stack([inputs[end] for inputs in conv])
        )


@dataclass(frozen=True, slots=True)
class HybridContext:
    """The context of a pass: attention by `attention`, recurrent layers by `recurrent`."""

    shape: RecurrentShape
    attention: Any
    """An `AttentionContext`."""
    recurrent: Any
    """A `RecurrentContext`; that of a prefill also has the states at the ends of its rows."""

    @property
    def recomputes(self) -> bool:
        """Whether a backward computes the recurrence again."""
        return isinstance(self.recurrent, PackedStates) and self.recurrent.recomputes

    @property
    def saved_kv(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Keys and values of each attention layer."""
        return self.attention.saved_kv  # type: ignore[no-any-return]

    @property
    def cached_queries(self) -> int:
        """As `AttentionContext.cached_queries`."""
        return int(self.attention.cached_queries)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, latents: Latents | None = None
    ) -> Tensor:
        """As `AttentionContext.attend`; `layer` is the number in the model."""
        return self.attention.attend(self.shape.attention_layers[layer], query, key, value, rule, latents)  # type: ignore[no-any-return]

    def mix(self, layer: int, inputs: MixerInputs) -> Tensor:
        """As `RecurrentContext.mix`; `layer` is the number in the model."""
        return self.recurrent.mix(self.shape.recurrent_layers[layer], inputs)  # type: ignore[no-any-return]


def hybrid_context(shape: RecurrentShape, tree: PackedTree, attention: Any, device: torch.device) -> HybridContext:
    """The context of a pass over a whole tree."""
    chunks = chunk_tree(parents_of(tree), shape.taps)
    recomputes = chunks.tokens.size * shape.slot_bytes(chunks.size) > MAX_KEPT_BYTES
    return HybridContext(shape, attention, PackedStates(ChunkTensors.of(chunks, device), recomputes=recomputes))


def packed_states(
    tree: ChunkTree, device: torch.device, outside: Sequence[RecurrentState] = (), *, saves: bool = False
) -> PackedStates:
    """Recurrent layers over the chunks of a pass."""
    return PackedStates(ChunkTensors.of(tree, device), outside, saves)


def recomputed(function: Any, *inputs: Tensor) -> Tensor:
    """`function` of tensors, of which only the inputs are saved: the backward computes it again.

    The recurrence keeps several float32 tensors per token and head, ten times its inputs.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return _Recomputed.apply(function, *inputs)  # type: ignore[no-any-return]
    return function(*inputs)  # type: ignore[no-any-return]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, function: partial[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.function = function
        return function(*inputs)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*leaves)
        return None, *torch.autograd.grad(output, leaves, grads[0])
