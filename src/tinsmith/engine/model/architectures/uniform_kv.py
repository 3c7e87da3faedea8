"""Keys and values of one shape for models whose layers differ in it, so that one KV cache holds all layers.

Key heads are repeated until all layers have as many, as grouped-query attention does itself, and widths are padded with
zeros, which add nothing to a score. The cache is as large as that of a model whose layers are all like the widest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from tinsmith.engine.model.architectures.latents import Latents
from tinsmith.engine.model.attention import AttentionContext
from tinsmith.engine.model.attention_rule import AttentionRule


@dataclass(frozen=True, slots=True)
class UniformKV:
    """The shape that all layers get."""

    heads: int
    key_width: int
    value_width: int

    def within(self, context: AttentionContext) -> AttentionContext:
        """The context for layers of any smaller shape."""
        return _UniformAttention(context, self)


@dataclass(frozen=True, slots=True)
class _UniformAttention:
    context: AttentionContext
    shape: UniformKV

    @property
    def cached_queries(self) -> int:
        return self.context.cached_queries

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, latents: Latents | None = None
    ) -> Tensor:
        """As `AttentionContext.attend`."""
        if latents is not None:  # the cache holds these, which have one shape
            return self.context.attend(layer, query, key, value, rule, latents)
        shape, width = self.shape, value.shape[3]
        if key.shape[1] < shape.heads:
            key, value = (tensor.repeat_interleave(shape.heads // key.shape[1], 1) for tensor in (key, value))
        query, key = (pad(tensor, (0, shape.key_width - tensor.shape[3])) for tensor in (query, key))
        output = self.context.attend(layer, query, key, pad(value, (0, shape.value_width - width)), rule)
        return output[..., :width]


def uniform_kv(saved: Sequence[tuple[Tensor, Tensor]]) -> UniformKV | None:
    """The shape for layers with these keys and values [1, heads, T, width]; None if they are alike, or if the heads of
    one cannot be repeated to be as many as those of another."""
    shapes = {(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in saved}
    heads = max(shape[0] for shape in shapes)
    if len(shapes) == 1 or any(heads % shape[0] for shape in shapes):
        return None
    return UniformKV(heads, max(shape[1] for shape in shapes), max(shape[2] for shape in shapes))
