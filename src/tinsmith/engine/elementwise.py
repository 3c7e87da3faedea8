"""What a layer does between its products: norm, rotation, gate; forward and backward by hand.

PyTorch would keep every temporary of these for the backward. Here each keeps only what others keep too: the gate its
inputs, the norm its output, which the products that read it keep; the rest is made anew. The norm takes the residual
stream in float32 and gives the base's dtype, so that what is summed over all layers is rounded once and not at each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
