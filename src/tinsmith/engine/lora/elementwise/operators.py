"""Norms, rotations and gates that save little for the backward.

PyTorch would save every temporary of these functions; here a gate saves its inputs, and a norm its output, which its
readers save anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override


def rms_norm(
    inputs: Tensor, weight: Tensor, eps: float, inverse: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """weight x / sqrt(mean(x^2) + eps) of inputs [..., D] of any float dtype, in `dtype`, by default the weight's;
    float32 inside.

    With `inverse`, 1 / weight in float32, the backward starts from the output and the inputs are not saved.
    """
    if torch.is_grad_enabled() and inputs.requires_grad:
        return _RMSNormFunction.apply(inputs, weight, eps, inverse, dtype)  # type: ignore[no-any-return]
    return _rms_norm(inputs, weight, eps, dtype)[0]


def rotary_tables(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin [1, T, D] of transformers, whose halves are equal, in the form that `apply_rotary` takes.

    Both are [1, T, 1, D]; the left half of sin is negated.
    """
    left, right = sin.to(dtype).chunk(2, dim=-1)
    return cos.to(dtype)[..., None, :], torch.cat([-left, right], dim=-1)[..., None, :]


def apply_rotary(inputs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of inputs [1, T, H, D] by `rotary_tables`; dimension i is paired with i + D / 2.

    Tables narrower than the inputs rotate their first dimensions only.
    """
    if (width := cos.shape[-1]) < inputs.shape[-1]:
        return torch.cat([apply_rotary(inputs[..., :width], cos, sin), inputs[..., width:]], -1)
    if torch.is_grad_enabled() and inputs.requires_grad:
        return _RotaryFunction.apply(inputs, cos, sin)  # type: ignore[no-any-return]
    return _apply_rotary(inputs, cos, sin, 1)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    if torch.is_grad_enabled() and gate.requires_grad:
        return _SiluMulFunction.apply(gate, up)  # type: ignore[no-any-return]
    return torch.nn.functional.silu(gate).mul_(up)


def _rms_norm(inputs: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """The normed inputs, and 1 / sqrt(mean(x^2) + eps) of each row [..., 1]."""
    wide = inputs.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse_rms = length.square_().div_(wide.shape[-1]).add_(eps).rsqrt_()
    return (wide * inverse_rms).mul_(weight).to(dtype or weight.dtype), inverse_rms


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, eps: float, inverse: Tensor | None, dtype: torch.dtype | None
    ) -> Tensor:
        output, inverse_rms = _rms_norm(inputs, weight, eps, dtype)
        ctx.save_for_backward(inputs if inverse is None else output, weight, inverse_rms, inverse)
        ctx.dtype = inputs.dtype
        return output

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        saved, weight, inverse_rms, inverse = ctx.saved_tensors
        normed = saved * (inverse_rms if inverse is None else inverse)  # x / sqrt(mean(x^2) + eps), float32
        grad = grads[0] * weight.float()
        along = (grad * normed).sum(-1, keepdim=True).div_(normed.shape[-1])
        return grad.addcmul_(normed, along, value=-1).mul_(inverse_rms).to(ctx.dtype), None, None, None, None


def _apply_rotary(inputs: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    return (inputs * cos).addcmul_(inputs.roll(inputs.shape[-1] // 2, dims=-1), sin, value=direction)


class _RotaryFunction(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, inputs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _apply_rotary(inputs, cos, sin, 1)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _apply_rotary(grads[0], cos, sin, -1), None, None


class _SiluMulFunction(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        up_grad = torch.nn.functional.silu(gate).mul_(grads[0])
        return torch.ops.aten.silu_backward(grads[0] * up, gate), up_grad
