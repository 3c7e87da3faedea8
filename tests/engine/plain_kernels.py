"""`fused.Kernels` in PyTorch's operators, with gradients by autograd: for machines without Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tinsmith.engine.lora.elementwise.operators import apply_rotary


class PlainKernels:
    """Computes in float32 and rounds once, as the kernels in Triton."""

    def add_norm(
        self, inputs: Tensor, addition: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        total = None if addition is None else inputs + addition
        wide = (inputs if total is None else total).float()
        inverse_rms = (wide.square().mean(-1) + eps).rsqrt()
        return total, (wide * inverse_rms[..., None] * weight.float()).to(dtype), inverse_rms

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
        scale = inverse_rms[..., None]
        total = saved.float() / weight.float() / scale if from_output else saved.float()
        eps = scale.square().reciprocal() - total.square().mean(-1, keepdim=True)
        grad = _gradients(lambda total: _normed(total, weight, eps), normed_grad.float(), total)[0]
        grad = grad if total_grad is None else grad + total_grad
        return grad.to(dtype), None if addition_dtype is None else grad.to(addition_dtype)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return _rotated(heads.float(), cos, sin, weight, eps).to(heads.dtype)

    def rotate_backward(
        self, grads: Tensor, heads: Tensor | None, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float
    ) -> Tensor:
        inputs = torch.zeros(grads.shape) if heads is None else heads.float()
        grad = _gradients(lambda heads: _rotated(heads, cos, sin, weight, eps), grads.float(), inputs)[0]
        return grad.to(grads.dtype, memory_format=torch.contiguous_format)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return _gated(gate.float(), up.float()).to(gate.dtype)

    def silu_mul_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        gate_grad, up_grad = _gradients(_gated, grad.float(), gate.float(), up.float())
        return gate_grad.to(gate.dtype), up_grad.to(up.dtype)

    def gated_norm(self, inputs: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _gated_norm(weight, eps)(inputs.float(), gate.float()).to(gate.dtype)

    def gated_norm_backward(
        self, grad: Tensor, inputs: Tensor, gate: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        grads = _gradients(_gated_norm(weight, eps), grad.float(), inputs.float(), gate.float())
        return grads[0].to(inputs.dtype), grads[1].to(gate.dtype)


def _gated_norm(weight: Tensor, eps: float) -> Callable[..., Tensor]:
    return lambda inputs, gate: _gated(gate, _normed(inputs, weight, eps))


def _normed(inputs: Tensor, weight: Tensor, eps: float | Tensor) -> Tensor:
    return inputs * (inputs.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    heads = heads if weight is None else _normed(heads, weight, eps)
    return apply_rotary(heads, cos.float()[:, None], sin.float()[:, None])


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def _gradients(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        return torch.autograd.grad(function(*leaves), leaves, grad)
