"""The Gated DeltaNet layer of Qwen3.5 and Qwen3-Next, with its states from the pass's context.

It takes the place of transformers' module, whose parameters it shares. Called without a context, as transformers calls
it in the check at load, it is that module. Qwen3-Next stores one matrix with the rows of queries, keys, values and
gates interleaved by head; they are copied into Qwen3.5's two matrices, so that adapters reach the same slices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers import PreTrainedConfig, PreTrainedModel
from typing_extensions import override

from tinsmith.engine.model.hybrid.chunk_rule import ChunkRule, HeadShape, chunk_rule
from tinsmith.engine.model.hybrid.states import HybridContext, MixerInputs, RecurrentShape, recomputed

MODEL_TYPES = {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}
"""Models whose linear attention is this layer."""

MIXER = "linear_attn"
"""Name of the layer in a decoder layer."""


class GatedDeltaNet(nn.Module):
    """The token mixer of a recurrent layer."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        if "in_proj_qkvz" in dict(base.named_children()):
            self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a = _sorted_projections(base)
        else:
            self.in_proj_qkv, self.in_proj_z = base.in_proj_qkv, base.in_proj_z
            self.in_proj_b, self.in_proj_a = base.in_proj_b, base.in_proj_a
        self.out_proj = base.out_proj
        # Parameters of its own on the same memory: the check at load widens each module's parameters while it runs.
        parameters = (base.A_log, base.dt_bias, base.norm.weight, base.conv1d.weight)
        self.A_log, self.dt_bias, self.norm_weight, self.conv_weight = (
            nn.Parameter(parameter.detach(), requires_grad=False) for parameter in parameters
        )
        self.eps = float(base.norm.variance_epsilon)
        self.key_heads, self.key_width = int(base.num_k_heads), int(base.head_k_dim)
        self.key_dim = self.key_heads * self.key_width
        self.value_heads, self.value_width = int(base.num_v_heads), int(base.head_v_dim)
        self.layer = int(base.layer_idx)
        self.original: nn.Module | None = base
        self.project: Callable[[Tensor], tuple[Tensor, ...]] | None = None
        """Computes `adapted` together: [1, C, D] -> [C, out] of each."""
        self.gated_norm: Callable[[Tensor, Tensor], Tensor] | None = None
        """Kernel on a GPU for the norm of outputs [C, Hv, dv] times gates of the same shape."""
        self.rule: ChunkRule = chunk_rule
        """The recurrence of a pass."""

    @override
    def forward(self, hidden_states: Tensor, context: HybridContext | None = None, **settings: Any) -> Tensor:
        if context is None:
            assert self.original is not None
            return self.original(hidden_states, **settings)  # type: ignore[no-any-return]
        inputs = hidden_states.squeeze(0)
        qkv, z = self.project(hidden_states) if self.project else (linear(inputs) for linear in self.adapted)
        mix, parts = partial(self._mix, context), (qkv, z, self.in_proj_b(inputs), self.in_proj_a(inputs))
        mixed = recomputed(mix, *parts) if context.recomputes else mix(*parts)
        return self.out_proj(mixed)[None]  # type: ignore[no-any-return]

    @property
    def shape(self) -> HeadShape:
        """Its heads and widths."""
        return HeadShape(self.key_heads, self.key_width, self.value_heads, self.value_width)

    @property
    def adapted(self) -> tuple[nn.Module, ...]:
        """The projections of queries, keys and values, and of gates, which read one input."""
        return self.in_proj_qkv, self.in_proj_z

    def _mix(self, context: HybridContext, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor) -> Tensor:
        """[C, value heads * value width] of the projected tokens."""
        decay = -self.A_log.float().exp() * softplus(a.float() + self.dt_bias.float())
        output = context.mix(
            self.layer,
            MixerInputs(
                qkv, decay, b.sigmoid(), self.conv_weight.squeeze(1), self.key_heads, self.key_width, self.rule
            ),
        )
        if self.gated_norm is not None:
            return self.gated_norm(output, z.view_as(output)).flatten(1)
        wide = output.to(z.dtype).float()  # rounded as transformers rounds it
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        gate = silu(z.float()).view_as(normed)
        return ((self.norm_weight * normed.to(z.dtype)) * gate).to(z.dtype).flatten(1)


def install(model: PreTrainedModel) -> RecurrentShape | None:
    """Replace the recurrent layers of a model; returns the shape of their states, None for a model without any."""
    config = model.config
    if config.model_type not in MODEL_TYPES:
        return None
    for module in list(model.base_model.modules()):
        base = dict(module.named_children()).get(MIXER)
        if base is not None:
            setattr(module, MIXER, GatedDeltaNet(base))
    return shape_of(config)


def drop_originals(model: PreTrainedModel) -> None:
    """Free transformers' modules, once they are not compared with any more."""
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            module.original = None


def shape_of(config: PreTrainedConfig) -> RecurrentShape:
    """Which layers of a model with this config are recurrent, and the shapes of their states."""
    layers: dict[str, dict[int, int]] = {"full_attention": {}, "linear_attention": {}}
    for layer, kind in enumerate(config.layer_types):
        layers[kind][layer] = len(layers[kind])
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return RecurrentShape(
        attention_layers=layers["full_attention"],
        recurrent_layers=layers["linear_attention"],
        state=(config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim),
        taps=config.linear_conv_kernel_dim,
        channels=2 * keys + config.linear_num_value_heads * config.linear_value_head_dim,
    )


def _sorted_projections(base: Any) -> tuple[nn.Linear, ...]:
    """Qwen3-Next's projections of q, k and v; of z; of b; and of a; each with its rows in the order of the heads."""
    values = base.num_v_heads // base.num_k_heads
    widths = (base.head_k_dim, base.head_k_dim, values * base.head_v_dim, values * base.head_v_dim)
    query, key, value, z = _by_head(base.in_proj_qkvz.weight, base.num_k_heads, widths)
    b, a = _by_head(base.in_proj_ba.weight, base.num_k_heads, (values, values))
    return tuple(_linear(weight) for weight in (torch.cat([query, key, value]), z, b, a))


def _by_head(weight: Tensor, heads: int, widths: tuple[int, ...]) -> list[Tensor]:
    """The rows of each part of a matrix whose rows are sorted by head first."""
    parts = weight.detach().view(heads, sum(widths), -1).split(widths, 1)
    return [part.flatten(0, 1).contiguous() for part in parts]


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
