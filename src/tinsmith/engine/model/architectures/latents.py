"""Latent attention (MLA) in float32: caches keep latents, and decoding attends to them without expanding them.

A token's keys and values are products of one latent c with each head's rows of `kv_b_proj`, W_k and W_v, and a key part
r with rotary embeddings that all heads share. Caches keep [c; r], one key head, whose first columns are the values. Two
forms of the same attention:

- Expanded: keys [W_k c; r] and values W_v c of each head, as transformers computes them. For passes over whole rows.
- Absorbed: since q W_k c = (W_kᵀ q) c, queries [W_kᵀ q; q_r] attend to [c; r] itself, and W_v is applied to each head's
  weighted sum of latents. For decoding: it computes more for each pair of query and key, and nothing for each key.

A prompt that continues a cached one takes the cheaper form. The results of the two differ by rounding. No adapter is on
`kv_b_proj`, so one product serves all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinsmith.engine.model.attention_rule import AttentionRule

_ATTRIBUTES = {"expand_kv", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"}
"""Of the attention modules of transformers that keep latents."""


class LatentContext(Protocol):
    """An `attention.AttentionContext`."""

    @property
    def cached_queries(self) -> int:
        """As `attention.AttentionContext.cached_queries`."""
        ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, latents: Latents | None = None
    ) -> Tensor:
        """As `attention.AttentionContext.attend`."""
        ...


@dataclass(frozen=True, slots=True)
class Latents:
    """What caches keep of one layer's tokens in a pass, and how the pass reads what they keep of earlier tokens."""

    tokens: Tensor
    """[1, 1, T, rank + R]."""
    attention: LatentAttention
    absorbs: bool
    _expanded: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values by address and number of the cached tokens: several calls of a pass read the same."""

    def keys_values(self, cached: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [heads, N, width] of cached tokens [1, N, rank + R], in the form that the pass computes."""
        rank = int(self.attention.module.kv_lora_rank)
        if self.absorbs:
            return cached, cached[..., :rank]
        place = (cached.data_ptr(), cached.shape[1])
        if place not in self._expanded:
            latent, rotary_key = cached[None, ..., :rank], cached[None, ..., rank:]
            keys, values = self.attention.expanded(latent, rotary_key)
            self._expanded[place] = keys[0], values[0]
        return self._expanded[place]


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """The two forms of one attention module."""

    module: Any
    implementation: str
    """Name of this engine's attention among those of transformers."""

    def expand_kv(self, latent: Tensor, rotary_key: Tensor) -> tuple[Tensor, Tensor]:
        """In place of the module's: leaves both as they are for `attend` where the engine's attention is called."""
        if self.module.config._attn_implementation == self.implementation:
            return latent, rotary_key
        return self.expanded(latent, rotary_key)

    def attend(
        self, context: LatentContext, query: Tensor, latent: Tensor, rotary_key: Tensor, rule: AttentionRule
    ) -> Tensor:
        """query [1, Hq, T, K], latent [1, 1, T, rank], rotary_key [1, 1, T, R] -> [1, T, Hq, V]."""
        layer, absorbs = int(self.module.layer_idx), 0 < context.cached_queries < self.worth_expanding
        latents = Latents(torch.cat([latent, rotary_key], -1), self, absorbs)
        if not absorbs:
            return context.attend(layer, query, *self.expanded(latent, rotary_key), rule, latents)
        of_key, of_value = self._weights()
        plain, rotary = query.split([of_key.shape[1], rotary_key.shape[3]], -1)
        absorbed = torch.cat([torch.matmul(plain, of_key), rotary], -1)
        sums = context.attend(layer, absorbed, latents.tokens, latents.tokens[..., : latent.shape[3]], rule, latents)
        return torch.matmul(sums.transpose(1, 2), of_value.transpose(1, 2)).transpose(1, 2)

    def expanded(self, latent: Tensor, rotary_key: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [1, Hq, N, width] of latents [1, 1, N, rank] and rotary keys [1, 1, N, R]."""
        return type(self.module).expand_kv(self.module, latent, rotary_key)  # type: ignore[no-any-return]

    @property
    def worth_expanding(self) -> float:
        """Queries for each cached token from which expanding it costs less than attending to its latent."""
        module = self.module
        rank, of_head = module.kv_lora_rank, module.qk_nope_head_dim + module.v_head_dim
        return rank * of_head / (2 * rank - of_head) if 2 * rank > of_head else float("inf")

    def _weights(self) -> tuple[Tensor, Tensor]:
        """Views of each head's rows of `kv_b_proj` [Hq, K or V, rank]: those of its keys and those of its values."""
        module, weight = self.module, self.module.kv_b_proj.weight
        rows = weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, weight.shape[1])
        return rows[:, : module.qk_nope_head_dim], rows[:, module.qk_nope_head_dim :]


def to_cache(key: Tensor, value: Tensor, latents: Latents | None) -> tuple[Tensor, Tensor]:
    """What caches keep of a layer's tokens in a pass: keys and values, or latents without values."""
    return (key, value) if latents is None else (latents.tokens, latents.tokens[..., :0])


def install(model: PreTrainedModel, implementation: str) -> int:
    """Let caches keep the latents of the model's attention; returns their width, 0 for a model without latents.

    Caches keep keys and values in bfloat16, where the two forms differ enough to move experts of a mixture between
    sampler and trainer, and where weights are not plain matrices, as in 4-bit blocks.
    """
    if model.dtype.itemsize < torch.float32.itemsize:
        return 0
    modules: list[Any] = [module for module in model.modules() if _has_latents(module)]
    widths = {int(module.kv_lora_rank) for module in modules}
    if len(widths) != 1:
        return 0
    for module in modules:
        module.latent_attention = LatentAttention(module, implementation)
        module.expand_kv = module.latent_attention.expand_kv
    return widths.pop()


def _has_latents(module: nn.Module) -> bool:
    """Whether a module expands latents by a linear module without bias, in the order that `_weights` reads."""
    if not set(dir(module)) >= _ATTRIBUTES:
        return False
    projection = module.kv_b_proj
    return isinstance(projection, nn.Linear) and projection.bias is None and projection.weight.is_floating_point()
