"""A layer's norms, attention and MLP in our own modules, where they compute what the base's own do.

Ours keep less for the backward, share products among projections with one input, and carry the residual stream in
float32. They stand in for the modules of the Llama, Qwen2, Qwen3 and Mistral kind, told by their parts: each norm, MLP
and attention must give what the base's gives on the same inputs, and the whole model the same hidden states on a text
with a fork in it. Any other model keeps its own modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tinsmith.engine.lora.linear import LoraLinear, project
from tinsmith.engine.model import attention
from tinsmith.engine.model.loading import BaseModel, forked_forest, probe, widened


def rms_norm(inputs: Tensor, weight: Tensor, eps: float, inverse: Tensor | None = None) -> Tensor:
    """inputs [..., D] of any float dtype -> weight x / sqrt(mean(x^2) + eps), the weight's dtype; float32 inside.

    With `inverse`, which is 1 / weight in float32, the backward starts from the output, and the inputs are not kept.
    """
    if torch.is_grad_enabled() and inputs.requires_grad:
        return _RmsNorm.apply(inputs, weight, eps, inverse)  # type: ignore[no-any-return]
    return _normed(inputs, weight, eps)[0]


def angles(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin [1, T, D] of transformers, whose halves are alike, as `rotate` takes them: [1, T, 1, D], the left
    half of sin negative."""
    left, right = sin.to(dtype).chunk(2, dim=-1)
    return cos.to(dtype)[..., None, :], torch.cat([-left, right], dim=-1)[..., None, :]


def rotate(inputs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of inputs [1, T, H, D] by what `angles` makes; pairs are (i, i + D / 2)."""
    if torch.is_grad_enabled() and inputs.requires_grad:
        return _Rotation.apply(inputs, cos, sin)  # type: ignore[no-any-return]
    return _rotated(inputs, cos, sin, 1)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up."""
    if torch.is_grad_enabled() and gate.requires_grad:
        return _Gate.apply(gate, up)  # type: ignore[no-any-return]
    return torch.nn.functional.silu(gate).mul_(up)


def _normed(inputs: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed inputs and each row's 1 / sqrt(...) [..., 1]."""
    wide = inputs.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    shrink = length.square_().div_(wide.shape[-1]).add_(eps).rsqrt_()
    return (wide * shrink).mul_(weight).to(weight.dtype), shrink


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float, inverse: Tensor | None) -> Tensor:
        output, shrink = _normed(inputs, weight, eps)
        ctx.save_for_backward(inputs if inverse is None else output, weight, shrink, inverse)
        ctx.dtype = inputs.dtype
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        kept, weight, shrink, inverse = ctx.saved_tensors
        unit = kept * (shrink if inverse is None else inverse)  # x / sqrt(...), float32
        slope = grads[0] * weight.float()
        along = (slope * unit).sum(-1, keepdim=True).div_(unit.shape[-1])
        return slope.addcmul_(unit, along, value=-1).mul_(shrink).to(ctx.dtype), None, None, None


def _rotated(inputs: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    return (inputs * cos).addcmul_(inputs.roll(inputs.shape[-1] // 2, dims=-1), sin, value=direction)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(inputs, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1), None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        into_up = torch.nn.functional.silu(gate).mul_(grads[0])
        return torch.ops.aten.silu_backward(grads[0] * up, gate), into_up


TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Of the whole model's hidden states, by their spread: in bfloat16 SmolLM2's own are 0.12 from float32, ours 0.01."""

MODULE_TOLERANCE = 1e-2
"""Of a single norm or MLP on random inputs."""

ATTENTION_TOLERANCE = 1e-3
"""Of a single attention, in float32 whatever the base's dtype is: bfloat16's rounding would hide a missing rotation."""

LEAST_WEIGHT = 2.0**20
"""Of a norm, in smallest normal numbers; with a smaller one it keeps its inputs for the backward, for its output says
too little of them."""

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}


class Shared:
    """Projections that read one input, computed together: [1, T, in] -> [T, out] of each."""

    def __init__(self, *linears: LoraLinear) -> None:
        self._projections, self._router = [linear.projection for linear in linears], linears[0].router

    def __call__(self, inputs: Tensor) -> tuple[Tensor, ...]:
        return project(inputs.squeeze(0), self._projections, self._router.parts)


class Norm(nn.Module):
    """RMSNorm: float32 or the weight's dtype in, the weight's dtype out."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps
        wide = weight.detach().float()
        self.inverse = 1 / wide if bool((wide.abs() > LEAST_WEIGHT * torch.finfo(weight.dtype).tiny).all()) else None

    def forward(self, inputs: Tensor) -> Tensor:
        return rms_norm(inputs, self.weight, self.eps, self.inverse)


class Rotary(nn.Module):
    """The base's rotary embedding, its tables as `rotate` takes them: made once for all layers."""

    def __init__(self, base: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.base, self.dtype = base, dtype

    def forward(self, *inputs: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        cos, sin = self.base(*inputs, **settings)
        return angles(cos, sin, self.dtype)


class Attention(nn.Module):
    """Attention over what the pass's context says; q and k are normed by head where the base does so."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = base.q_proj, base.k_proj, base.v_proj, base.o_proj
        parts = dict(base.named_children())
        self.q_norm, self.k_norm = (_ours(parts[name]) if name in parts else None for name in ("q_norm", "k_norm"))
        self.layer, self.width, self.scale = int(base.layer_idx), int(base.head_dim), float(base.scaling)
        self._shared = Shared(base.q_proj, base.k_proj, base.v_proj)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], context: attention.Context, **_: Any
    ) -> tuple[Tensor, None]:
        found = self._shared(hidden_states)
        query, key, value = (one.view(1, len(one), -1, self.width) for one in found)  # [1, T, H, D]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (rotate(one, *position_embeddings).transpose(1, 2) for one in (query, key))
        seen = context.attend(self.layer, query, key, value.transpose(1, 2), self.scale)
        return self.o_proj(seen.flatten(2)), None


class Mlp(nn.Module):
    """down(silu(gate) up)."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = base.gate_proj, base.up_proj, base.down_proj
        self._shared = Shared(base.gate_proj, base.up_proj)

    def forward(self, inputs: Tensor) -> Tensor:
        gate, up = self._shared(inputs)
        return self.down_proj(gated(gate, up)[None])


@torch.no_grad()
def take_over(base: BaseModel) -> BaseModel:
    """The base, its LoraLinears in place, with our modules where they do the same; else as it was."""
    places = list(_places(base))
    if not places:
        return base
    before = probe(base)
    old = [(parent, name, parent.get_submodule(name)) for parent, name, _ in places]
    for parent, name, module in places:
        setattr(parent, name, module)
    ours = replace(base, wide=True)
    if _agrees(ours, before):
        return ours
    for parent, name, module in old:
        setattr(parent, name, module)
    return base


def _agrees(ours: BaseModel, before: Tensor) -> bool:
    try:
        error = (probe(ours) - before).abs().mean() / before.std().clamp(min=1e-6)
    except Exception:  # noqa: BLE001 - what the base has between our modules may fail in any way on a float32 stream
        return False
    return bool(error < TOLERANCE[ours.dtype])


def _places(base: BaseModel) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, child's name, our module for it) of a body all of whose norms, attentions and MLPs are known."""
    body = base.body
    found = [
        (parent, name, _ours(child))
        for parent in list(body.modules())
        for name, child in list(parent.named_children())
        if name not in _NORMS  # those go with their attention
    ]
    known = [(parent, name, module) for parent, name, module in found if module is not None]
    layers = sum(isinstance(module, Mlp) for _, _, module in known)
    norms = sum(isinstance(module, Norm) for _, _, module in known)
    attentions = sum(isinstance(module, Attention) for _, _, module in known)
    rotary = dict(body.named_children()).get("rotary_emb")
    whole = layers and layers == attentions and norms == 2 * layers + 1
    if not rotary or not whole:
        return
    pairs = [(parent.get_submodule(name), module) for parent, name, module in known]
    if all(_attends_alike(base, one, rotary) if isinstance(two, Attention) else _same(one, two) for one, two in pairs):
        yield from known
        yield body, "rotary_emb", Rotary(rotary, next(body.parameters()).dtype)


def _attends_alike(base: BaseModel, theirs: nn.Module, rotary: nn.Module) -> bool:
    """Whether an attention of the base gives what ours in its place gives, on random inputs in float32."""
    forest = forked_forest(base)
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, len(forest.tokens), base.head.shape[1], generator=draw).to(base.device)
    positions = torch.as_tensor(forest.positions, device=base.device)[None]
    context = attention.packed(forest, torch.float32, base.device)
    linears = [one for one in theirs.modules() if isinstance(one, LoraLinear)]
    plain = [one.product for one in linears]
    try:
        for one in linears:
            one.product = one.product.widened()
        ours = Attention(theirs)  # over the wide products
        with widened(theirs), widened(ours):
            tables = rotary(inputs, positions)
            expected = theirs(hidden_states=inputs, position_embeddings=tables, attention_mask=None, context=context)[0]
            got = ours(inputs, Rotary(rotary, torch.float32)(inputs, positions), context)[0]
    except Exception:  # noqa: BLE001 - whatever it raises when called like this, it is none of the kinds that ours are
        return False
    finally:
        for one, product in zip(linears, plain, strict=True):
            one.product = product
    return bool((got - expected).abs().mean() <= ATTENTION_TOLERANCE * expected.std())


def _same(theirs: nn.Module, ours: nn.Module) -> bool:
    """Whether a norm or an MLP gives what the base's own gives."""
    like: Any = ours.weight if isinstance(ours, Norm) else ours.gate_proj.product  # type: ignore[union-attr]
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 3, like.shape[-1], generator=draw).to(like.device, like.dtype)
    expected = theirs(inputs).float()
    return bool((ours(inputs).float() - expected).abs().mean() <= MODULE_TOLERANCE * expected.std())


def _ours(module: nn.Module) -> nn.Module | None:
    """Our module in place of one of transformers', or None if it is none of the three kinds."""
    children, kind = {name for name, _ in module.named_children()}, type(module).__name__
    linear = all(isinstance(child, LoraLinear) for name, child in module.named_children() if name.endswith("_proj"))
    if children >= _ATTENTION and children - _ATTENTION <= _NORMS and linear:
        by_head = all(_is_by_head(module.get_submodule(name), module.head_dim) for name in children & _NORMS)
        return Attention(module) if by_head else None
    if children >= _MLP and children - _MLP <= {"act_fn"} and linear and _is_silu(module.act_fn):  # type: ignore[arg-type]
        return Mlp(module)
    if kind.endswith("RMSNorm") and not children and "variance_epsilon" in vars(module):
        return Norm(module.weight, float(module.variance_epsilon))  # type: ignore[arg-type]
    return None


def _is_by_head(norm: nn.Module, width: Any) -> bool:
    """Whether a norm of queries or keys is one that we know, over each head by itself."""
    return isinstance(ours := _ours(norm), Norm) and ours.weight.numel() == width


def _is_silu(activation: nn.Module) -> bool:
    values = torch.linspace(-9, 9, 64)
    return bool(torch.allclose(activation(values), nn.functional.silu(values)))
