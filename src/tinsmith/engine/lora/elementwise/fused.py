"""Norms, rotations and gates by fused kernels, with gradients of the inputs; weights are frozen.

Each is one kernel forward and one backward. They save what `operators` saves, except that a norm of heads saves its
inputs in place of its outputs. Everything works without Triton and Numba, which only the kernels need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override


class Kernels(Protocol):
    """What a GPU computes in one launch each, and a CPU in one loop: inputs and outputs are [..., D], contiguous unless
    noted."""

    def add_norm(
        self, inputs: Tensor, addition: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """The sum of inputs and addition, or None without one; its RMSNorm in `dtype`; 1 / sqrt(mean(sum^2) + eps)
        of each row, float32 [...]."""
        ...

    def add_norm_backward(
        self,
        normed_grad: Tensor,
        total_grad: Tensor | None,
        saved: Tensor,
        weight: Tensor,
        inverse_rms: Tensor,
        dtype: torch.dtype,
        addition_dtype: torch.dtype | None,
        *,
        from_output: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient of the sum in `dtype`, and in `addition_dtype` if there is one. `saved` is the sum, or, if
        `from_output`, the norm's output."""
        ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Heads [T, H, D], of any strides but the last, normed if there is a weight [D], and rotated by
        `operators.rotary_tables` [T, R]."""
        ...

    def rotate_backward(
        self, grads: Tensor, heads: Tensor | None, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float
    ) -> Tensor:
        """The gradient of the heads. `grads` has any strides but the last."""
        ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        ...

    def silu_mul_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of gate and up."""
        ...

    def gated_norm(self, inputs: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of the inputs times silu(gate), in the gate's dtype."""
        ...

    def gated_norm_backward(
        self, grad: Tensor, inputs: Tensor, gate: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The gradients of inputs and gate."""
        ...


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm's constants."""

    weight: Tensor
    eps: float
    dtype: torch.dtype
    """Of its output."""
    invertible: bool
    """Whether the backward can start from the output: no weight is nearly zero."""


def add_norm(kernels: Kernels, residual: Tensor, addition: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """residual + addition, where there is one, and its RMSNorm, of [..., D].

    Returns the residual also without an addition, so that both its gradients are added in the norm's kernel.
    """
    if torch.is_grad_enabled() and residual.requires_grad:
        return _AddNorm.apply(residual, addition, norm, kernels)  # type: ignore[no-any-return]
    total, normed, _ = _add_norm(kernels, residual, addition, norm)
    return residual if total is None else total, normed


def rotate(kernels: Kernels, heads: Tensor, tables: tuple[Tensor, Tensor], norm: Norm | None) -> Tensor:
    """Heads [1, T, H, D], each normed where there is a norm, rotated by `operators.rotary_tables`."""
    if torch.is_grad_enabled() and heads.requires_grad:
        return _Rotate.apply(heads, *tables, norm, kernels)  # type: ignore[no-any-return]
    return _rotate(kernels, heads, tables, norm)


def silu_mul(kernels: Kernels, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    if torch.is_grad_enabled() and gate.requires_grad:
        return _SiluMul.apply(gate, up, kernels)  # type: ignore[no-any-return]
    return kernels.silu_mul(gate.contiguous(), up.contiguous())


def gated_norm(kernels: Kernels, weight: Tensor, eps: float, inputs: Tensor, gate: Tensor) -> Tensor:
    """RMSNorm of inputs [..., D] with `weight`, times silu(gate), in the gate's dtype."""
    if torch.is_grad_enabled() and (inputs.requires_grad or gate.requires_grad):
        return _GatedNorm.apply(kernels, weight, eps, inputs, gate)  # type: ignore[no-any-return]
    return kernels.gated_norm(inputs.contiguous(), gate.contiguous(), weight, eps)


def _add_norm(
    kernels: Kernels, residual: Tensor, addition: Tensor | None, norm: Norm
) -> tuple[Tensor | None, Tensor, Tensor]:
    contiguous = None if addition is None else addition.contiguous()
    return kernels.add_norm(residual.contiguous(), contiguous, norm.weight, norm.eps, norm.dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, residual: Tensor, addition: Tensor | None, norm: Norm, kernels: Kernels
    ) -> tuple[Tensor, Tensor]:
        total, normed, inverse_rms = _add_norm(kernels, residual, addition, norm)
        total = residual if total is None else total
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(normed if norm.invertible else total, inverse_rms)
        ctx.dtypes = residual.dtype, None if addition is None else addition.dtype
        ctx.norm, ctx.kernels = norm, kernels
        return total, normed

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        total_grad, normed_grad = grads
        if normed_grad is None:
            dtype = ctx.dtypes[1]
            return total_grad, None if dtype is None or total_grad is None else total_grad.to(dtype), None, None
        saved, inverse_rms = ctx.saved_tensors
        grad, addition_grad = ctx.kernels.add_norm_backward(
            normed_grad.contiguous(),
            None if total_grad is None else total_grad.contiguous(),
            saved.contiguous(),
            ctx.norm.weight,
            inverse_rms,
            *ctx.dtypes,
            from_output=ctx.norm.invertible,
        )
        return grad, addition_grad, None, None


def _rotate(kernels: Kernels, heads: Tensor, tables: tuple[Tensor, Tensor], norm: Norm | None) -> Tensor:
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    cos, sin = map(_table, tables)
    return kernels.rotate(_heads(heads), cos, sin, weight, eps)[None]


def _heads(heads: Tensor) -> Tensor:
    """[1, T, H, D] -> [T, H, D]."""
    return heads[0] if heads.stride(-1) == 1 else heads[0].contiguous()


def _table(table: Tensor) -> Tensor:
    """[1, T, 1, R] -> [T, R]."""
    return table[0, :, 0].contiguous()


class _Rotate(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, norm: Norm | None, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(cos, sin, None if norm is None else heads)
        ctx.norm, ctx.kernels = norm, kernels
        return _rotate(kernels, heads, (cos, sin), norm)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin, heads = ctx.saved_tensors
        weight, eps = (None, 0.0) if ctx.norm is None else (ctx.norm.weight, ctx.norm.eps)
        inputs = None if heads is None else _heads(heads)
        grad = ctx.kernels.rotate_backward(_heads(grads[0]), inputs, _table(cos), _table(sin), weight, eps)
        return grad[None], None, None, None, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: Kernels) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return kernels.silu_mul(gate, up)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return *ctx.kernels.silu_mul_backward(grads[0].contiguous(), *ctx.saved_tensors), None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, kernels: Kernels, weight: Tensor, eps: float, inputs: Tensor, gate: Tensor) -> Tensor:
        inputs, gate = inputs.contiguous(), gate.contiguous()
        ctx.save_for_backward(inputs, gate)
        ctx.kernels, ctx.weight, ctx.eps = kernels, weight, eps
        return kernels.gated_norm(inputs, gate, weight, eps)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, Tensor, Tensor]:
        grad = grads[0].contiguous()
        return None, None, None, *ctx.kernels.gated_norm_backward(grad, *ctx.saved_tensors, ctx.weight, ctx.eps)
