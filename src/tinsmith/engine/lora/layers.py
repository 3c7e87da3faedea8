"""Own modules for a layer's norms, attention and MLP, which replace the base model's where they compute the same.

They save less for the backward (`elementwise`), compute projections that share an input together, and keep the residual
stream in float32, so that the sum over all layers is rounded once.

`replace_layers` recognizes modules of the Llama, Qwen and Mistral families by their parts. Each replacement
must give the original's output on the same inputs, and the whole model the same hidden states on a small tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tinsmith.engine.lora.elementwise import fused
from tinsmith.engine.lora.elementwise.operators import apply_rotary, rms_norm, rotary_tables, silu_mul
from tinsmith.engine.lora.linear import LoraLinear, project
from tinsmith.engine.model.attention import AttentionContext, packed_attention
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model.hybrid.gated_delta_net import GatedDeltaNet
from tinsmith.engine.model.self_check import in_float32, probe, probe_tree
from tinsmith.engine.model.support import is_expert_stack

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Mean error of the whole model's hidden states in units of their standard deviation. In bfloat16, SmolLM2's own
modules are 0.12 from float32, the replacements 0.01."""

MODULE_TOLERANCE = 1e-2
"""The same for a single norm or MLP on random inputs."""

ATTENTION_TOLERANCE = 1e-3
"""The same for a single attention, in float32 for every dtype: bfloat16's rounding would hide a missing rotation."""

MIN_NORM_WEIGHT = 2.0**20
"""In units of the dtype's smallest normal number. A norm with a smaller weight saves its inputs for the backward,
because they cannot be recovered from its output."""

Replacement = tuple[nn.Module, str, nn.Module]
"""A module's parent, its name there, and what replaces it."""
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_ZERO_CENTRED = {"Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "Qwen3NextRMSNorm"}
"""Norms that multiply by 1 + weight."""


class FusedProjections:
    """Projections that read the same input, computed together: [..., in] -> [T, out] of each."""

    def __init__(self, *linears: LoraLinear) -> None:
        self._projections, self._active = [linear.projection for linear in linears], linears[0].active

    def __call__(self, inputs: Tensor) -> tuple[Tensor, ...]:
        return project(inputs.flatten(0, -2), self._projections, self._active.groups)


class RMSNorm(nn.Module):
    """RMSNorm of float32 or the base's dtype; the output has the base's dtype.

    The norms of some models multiply by 1 + weight, in float32.
    """

    def __init__(self, base: Any, eps: float, *, plus_one: bool = False) -> None:
        super().__init__()
        self.weight, self.eps, self.dtype = base.weight, eps, base.weight.dtype
        wide = base.weight.detach().float()
        if plus_one:
            wide = wide + 1
            self.weight = nn.Parameter(wide, requires_grad=False)
        invertible = bool((wide.abs() > MIN_NORM_WEIGHT * torch.finfo(self.dtype).tiny).all())
        self.inverse = 1 / wide if invertible else None
        self.kernels: fused.Kernels | None = None  # set by `fused_layers`

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        return self.after(inputs, None)[1]

    def after(self, residual: Tensor, addition: Tensor | None) -> tuple[Tensor, Tensor]:
        """residual + addition, where there is one, and its norm."""
        if self.kernels is not None:
            return fused.add_norm(self.kernels, residual, addition, self.constants)
        total = residual if addition is None else residual + addition
        return total, rms_norm(total, self.weight, self.eps, self.inverse, self.dtype)

    @property
    def constants(self) -> fused.Norm:
        """Argument of `fused`."""
        return fused.Norm(self.weight, self.eps, self.dtype, self.inverse is not None)


class RotaryEmbedding(nn.Module):
    """The base's rotary embedding, with tables as `apply_rotary` takes them; computed once for all layers."""

    def __init__(self, base: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.base, self.dtype = base, dtype

    @override
    def forward(self, *inputs: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        cos, sin = self.base(*inputs, **settings)
        return rotary_tables(cos, sin, self.dtype)


class Attention(nn.Module):
    """Attention by the pass's context; q and k are normed per head, and outputs gated, where the base does so."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = base.q_proj, base.k_proj, base.v_proj, base.o_proj
        parts = dict(base.named_children())
        norms = (_replacement(parts[name]) if name in parts else None for name in ("q_norm", "k_norm"))
        self.q_norm, self.k_norm = norms
        self.layer, self.width, self.rule = (
            int(base.layer_idx),
            int(base.head_dim),
            AttentionRule(float(base.scaling)),
        )  # completed by `_same_attention`
        self._fused = FusedProjections(base.q_proj, base.k_proj, base.v_proj)
        self.is_gated = base.q_proj.target.outputs == 2 * base.o_proj.target.inputs
        self.kernels: fused.Kernels | None = None

    @override
    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], context: AttentionContext, **_: Any
    ) -> tuple[Tensor, None]:
        outputs = [output.view(1, len(output), -1, self.width) for output in self._fused(hidden_states)]
        query, key, value = outputs  # [1, T, H, D]
        gate = None
        if self.is_gated:
            query, gate = (query[:, :, start::2] for start in (0, 1))  # each head's queries, then its gates
        query, key = (
            self._rotated(heads, norm, position_embeddings).transpose(1, 2)
            for heads, norm in ((query, self.q_norm), (key, self.k_norm))
        )
        attended = context.attend(self.layer, query, key, value.transpose(1, 2), self.rule)
        if gate is not None:
            attended = attended * gate.sigmoid()
        return self.o_proj(attended.flatten(2)), None

    def _rotated(self, heads: Tensor, norm: nn.Module | None, tables: tuple[Tensor, Tensor]) -> Tensor:
        """The heads [1, T, H, D], normed and rotated."""
        if self.kernels is not None:
            return fused.rotate(self.kernels, heads, tables, norm.constants if isinstance(norm, RMSNorm) else None)
        return apply_rotary(heads if norm is None else norm(heads), *tables)


class MLP(nn.Module):
    """down(silu(gate) * up)."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = base.gate_proj, base.up_proj, base.down_proj
        self._fused = FusedProjections(base.gate_proj, base.up_proj)
        self.kernels: fused.Kernels | None = None

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        gate, up = self._fused(inputs)
        product = self._gated(gate, up)
        with recomputed_in_backward(product, partial(self._gated, gate, up)):
            return self.down_proj(product.view(*inputs.shape[:-1], -1))

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return silu_mul(gate, up) if self.kernels is None else fused.silu_mul(self.kernels, gate, up)


def recomputed_in_backward(tensor: Tensor, compute: Callable[[], Tensor]) -> AbstractContextManager[object]:
    """Have functions that save a tensor for their backward save how to compute it, so that it takes no memory until
    then: on a CPU, where that takes less than a hundredth of a pass."""
    if tensor.device.type != "cpu" or not torch.is_grad_enabled():
        return nullcontext()
    address, size = tensor.data_ptr(), tensor.numel()

    def save(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        is_tensor = saved.data_ptr() == address and saved.numel() == size and saved.is_contiguous()
        return partial(_computed, compute, saved.shape) if is_tensor else saved

    return torch.autograd.graph.saved_tensors_hooks(save, lambda saved: saved if isinstance(saved, Tensor) else saved())


@torch.no_grad()
def _computed(compute: Callable[[], Tensor], shape: torch.Size) -> Tensor:
    return compute().view(shape)


@torch.no_grad()
def replace_layers(base: BaseModel) -> BaseModel:
    """The base, which `adapt` has adapted, with its modules replaced if the results agree; else unchanged."""
    for module in base.model.modules():
        if isinstance(module, GatedDeltaNet):
            module.project = FusedProjections(*module.adapted)  # type: ignore[arg-type]
    replacements = _replacements(base)
    rules = base.checks.result("layers", lambda: _rules(base, replacements)) if replacements else None
    if rules is None:
        return base
    for attention, rule in zip(_attentions(replacements), rules, strict=True):
        attention.rule = AttentionRule(**rule)
    for parent, name, module in replacements:
        setattr(parent, name, module)
    return replace(base, float32_residual=True)


def _attentions(replacements: Sequence[Replacement]) -> list[Attention]:
    return [module for _, _, module in replacements if isinstance(module, Attention)]


def _rules(base: BaseModel, replacements: Sequence[Replacement]) -> list[dict[str, Any]] | None:
    """The fields of the rule of each attention among the replacements; None if they compute something else than the
    modules that they replace."""
    rotary = base.body.get_submodule("rotary_emb")
    for parent, name, module in replacements[:-1]:  # the last is the rotary embedding
        if not _same_outputs(base, parent.get_submodule(name), module, rotary):
            return None
    expected = probe(base)
    originals = [(parent, name, parent.get_submodule(name)) for parent, name, _ in replacements]
    for parent, name, module in replacements:
        setattr(parent, name, module)
    agree = same_hidden_states(replace(base, float32_residual=True), expected)
    for parent, name, module in originals:
        setattr(parent, name, module)
    if not agree:
        return None
    rules = [module.rule for module in _attentions(replacements)]
    return [{field.name: getattr(rule, field.name) for field in fields(rule)} for rule in rules]


def replace_layers_as(base: BaseModel, probe_base: BaseModel) -> BaseModel:
    """The base with its modules replaced as those of `probe_base` were, the first layers of the same model.

    Nothing is computed, so the base's projections may have no values yet. All layers must be alike.
    """
    rules = [module.rule for module in probe_base.body.modules() if isinstance(module, Attention)]
    body = base.body
    for parent in list(body.modules()):
        for name, child in list(parent.named_children()):
            if name not in HEAD_NORMS and (module := _replacement(child)) is not None:
                if isinstance(module, Attention):
                    module.rule = rules[0]
                setattr(parent, name, module)
    rotary = body.get_submodule("rotary_emb")
    body.rotary_emb = RotaryEmbedding(rotary, base.dtype)
    return replace(base, float32_residual=True)


def same_hidden_states(replaced: BaseModel, expected: Tensor) -> bool:
    """Whether the model gives the hidden states of `probe`."""
    try:
        error = (probe(replaced) - expected).abs().mean() / expected.std().clamp(min=1e-6)
    except Exception:  # noqa: BLE001 - modules between the replacements may fail in any way on a float32 stream
        return False
    return bool(error < TOLERANCE[replaced.dtype])


def _replacements(base: BaseModel) -> list[Replacement]:
    """The replacements of all norms, attentions and MLPs of the body, and of its rotary embedding; empty if some cannot
    be replaced.

    A layer has an MLP, or experts, which stay as they are, and possibly an MLP that all tokens share.
    """
    body = base.body
    candidates = [
        (parent, name, _replacement(child))
        for parent in list(body.modules())
        for name, child in list(parent.named_children())
        if name not in HEAD_NORMS  # replaced together with their attention
    ]
    replacements = [(parent, name, module) for parent, name, module in candidates if module is not None]
    mlps = sum(isinstance(module, MLP) for _, _, module in replacements)
    linear_mlps = sum({name for name, _ in module.named_children()} >= _MLP for module in body.modules())
    mixtures = sum(map(is_expert_stack, body.modules()))
    norms = sum(isinstance(module, RMSNorm) for _, _, module in replacements)
    attentions = sum(isinstance(module, Attention) for _, _, module in replacements)
    mixers = attentions + sum(isinstance(module, GatedDeltaNet) for module in body.modules())
    rotary = dict(body.named_children()).get("rotary_emb")
    complete = attentions and norms == 2 * mixers + 1 and mlps == linear_mlps and mlps + mixtures >= mixers
    if not rotary or not complete:
        return []
    return [*replacements, (body, "rotary_emb", RotaryEmbedding(rotary, next(body.parameters()).dtype))]


def _same_outputs(base: BaseModel, original: nn.Module, replacement: nn.Module, rotary: nn.Module) -> bool:
    """Whether a replacement gives the outputs of the original on random inputs."""
    if isinstance(replacement, Attention):
        return _same_attention(base, original, replacement, rotary)
    weight: Any = replacement.weight if isinstance(replacement, RMSNorm) else replacement.gate_proj.frozen  # type: ignore[union-attr]
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 3, weight.shape[-1], generator=draw).to(weight.device, weight.dtype)
    expected = original(inputs).float()
    return bool((replacement(inputs).float() - expected).abs().mean() <= MODULE_TOLERANCE * expected.std())


@dataclass(slots=True)
class _RuleRecorder:
    """Attention context that keeps the rule which a module passes: its window may be known to the module alone."""

    context: AttentionContext
    rule: AttentionRule | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """As `AttentionContext.attend`."""
        self.rule = rule
        return self.context.attend(layer, query, key, value, rule)


def _same_attention(base: BaseModel, original: nn.Module, final: Attention, rotary: nn.Module) -> bool:
    """The same for an attention, in float32; gives `final`, its replacement, the original's rule."""
    tree = probe_tree(base)
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, len(tree.tokens), base.head.shape[1], generator=draw).to(base.device)
    positions = torch.as_tensor(tree.positions, device=base.device)[None]
    context = _RuleRecorder(packed_attention(tree, torch.float32, base.device))
    linears = [module for module in original.modules() if isinstance(module, LoraLinear)]
    narrow = [linear.frozen for linear in linears]
    try:
        for linear in linears:
            linear.frozen = linear.frozen.float32()
        replacement = Attention(original)  # built on the float32 projections
        for norm in (replacement.q_norm, replacement.k_norm):
            if isinstance(norm, RMSNorm):
                norm.dtype = torch.float32
        with in_float32(original), in_float32(replacement):
            tables = rotary(inputs, positions)
            expected = original(hidden_states=inputs, position_embeddings=tables, attention_mask=None, context=context)[
                0
            ]
            replacement.rule = final.rule = context.rule or final.rule
            output = replacement(inputs, RotaryEmbedding(rotary, torch.float32)(inputs, positions), context)[0]
    except Exception:  # noqa: BLE001 - an attention that cannot be called like this is of another kind
        return False
    finally:
        for linear, frozen in zip(linears, narrow, strict=True):
            linear.frozen = frozen
    return bool((output - expected).abs().mean() <= ATTENTION_TOLERANCE * expected.std())


def _replacement(module: nn.Module) -> nn.Module | None:
    """The replacement of one of transformers' modules, or None for other kinds."""
    children, kind = {name for name, _ in module.named_children()}, type(module).__name__
    linear = all(isinstance(child, LoraLinear) for name, child in module.named_children() if name.endswith("_proj"))
    if children >= _ATTENTION and children - _ATTENTION <= HEAD_NORMS and linear:
        per_head = all(_is_per_head(module.get_submodule(name), module.head_dim) for name in children & HEAD_NORMS)
        return Attention(module) if per_head else None
    if children >= _MLP and children - _MLP <= {"act_fn"} and linear and _is_silu(module.act_fn):  # type: ignore[arg-type]
        return MLP(module)
    if kind.endswith("RMSNorm") and not children and "variance_epsilon" in vars(module):
        return RMSNorm(module, float(module.variance_epsilon))  # type: ignore[arg-type]
    if kind in _ZERO_CENTRED:
        return RMSNorm(module, float(module.eps), plus_one=True)  # type: ignore[arg-type]
    return None


def _is_per_head(norm: nn.Module, width: Any) -> bool:
    """Whether a norm of queries or keys is an RMSNorm over each head."""
    return isinstance(replacement := _replacement(norm), RMSNorm) and replacement.weight.numel() == width


def _is_silu(activation: nn.Module) -> bool:
    values = torch.linspace(-9, 9, 64)
    return bool(torch.allclose(activation(values), nn.functional.silu(values)))
