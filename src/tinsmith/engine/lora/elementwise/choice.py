"""The choice of fused kernels for a device, and their check against PyTorch's operators at a model's own widths."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tinsmith.engine.cpu.arguments import has_loops
from tinsmith.engine.lora.elementwise import fused, operators
from tinsmith.engine.triton_support import runs_triton

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Mean error of outputs and gradients in units of their standard deviation, by the dtype that is rounded to."""

ROWS = 3
"""Positions that a check computes."""


def kernels_on(device: torch.device, dtype: torch.dtype) -> fused.Kernels | None:
    """The kernels for a base model of this dtype on this device, unchecked; None if there are none."""
    try:  # Triton is where GPUs are
        if runs_triton(device):
            from tinsmith.engine.lora.elementwise import gpu_kernels

            return gpu_kernels
        if has_loops(device, dtype):
            from tinsmith.engine.lora.elementwise.cpu_kernels import CPUKernels

            return CPUKernels()
    except Exception:
        log.warning("Fused kernels do not work here: training and sampling are slower without them.", exc_info=True)
    return None


def check_norm(kernels: fused.Kernels, norm: fused.Norm) -> None:
    """Raises ValueError unless residual additions and norms, and norms alone, equal PyTorch's."""
    width, device = norm.weight.numel(), norm.weight.device
    residual, addition = _drawn(0, ROWS, width).to(device), _drawn(1, ROWS, width).to(device, norm.dtype)

    def expected(residual: Tensor, *addition: Tensor) -> tuple[Tensor, ...]:
        total = residual + addition[0] if addition else residual
        return total, operators.rms_norm(total, norm.weight, norm.eps, None, torch.float32)

    def actual(residual: Tensor, addition: Tensor | None = None) -> tuple[Tensor, ...]:
        return fused.add_norm(kernels, residual, addition, norm)

    for inputs in ([residual], [residual, addition]):
        _compare(actual, expected, inputs, TOLERANCE[norm.dtype])


def check_rotation(
    kernels: fused.Kernels, heads: tuple[int, int], norm: fused.Norm | None, rotary: int, like: Tensor
) -> None:
    """Raises ValueError unless rotations of the first `rotary` numbers of heads, (number, width), equal PyTorch's.

    Heads and gradients have strides as in a model whose projection also computes gates; dtype and device of `like`.
    """
    count, width = heads
    angles = _drawn(2, 1, ROWS, rotary // 2).repeat(1, 1, 2)
    tables = operators.rotary_tables(angles.cos().to(like), angles.sin().to(like), like.dtype)

    def expected(wide: Tensor) -> tuple[Tensor, ...]:
        heads = wide[:, :, ::2]
        if norm is not None:
            heads = operators.rms_norm(heads, norm.weight, norm.eps, None, torch.float32)
        return (operators.apply_rotary(heads, *(table.float() for table in tables)).transpose(1, 2),)

    def actual(wide: Tensor) -> tuple[Tensor, ...]:
        return (fused.rotate(kernels, wide[:, :, ::2], tables, norm).transpose(1, 2),)

    _compare(actual, expected, [_drawn(3, 1, ROWS, 2 * count, width).to(like)], TOLERANCE[like.dtype])


def check_gate(kernels: fused.Kernels, width: int, like: Tensor) -> None:
    """Raises ValueError unless gated products equal PyTorch's."""
    inputs = [_drawn(seed, ROWS, width).to(like) for seed in (4, 5)]
    _compare(
        lambda gate, up: (fused.silu_mul(kernels, gate, up),),
        lambda gate, up: (operators.silu_mul(gate, up),),
        inputs,
        TOLERANCE[like.dtype],
    )


def check_gated_norm(kernels: fused.Kernels, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
    """Raises ValueError unless norms of float32 times gates of `dtype` equal PyTorch's."""
    width = weight.numel()

    def expected(inputs: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        return (operators.silu_mul(gate, operators.rms_norm(inputs, weight, eps, None, torch.float32)),)

    def actual(inputs: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        return (fused.gated_norm(kernels, weight, eps, inputs, gate),)

    inputs, gate = (_drawn(seed, ROWS, 2, width).to(weight.device) for seed in (6, 7))
    _compare(actual, expected, [inputs, gate.to(dtype)], TOLERANCE[dtype])


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _compare(
    actual: Callable[..., Sequence[Tensor]],
    expected: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    tolerance: float,
) -> None:
    """Compare outputs and gradients with those that `expected` computes in float32, and outputs without a graph."""
    results = []
    for function, dtype in ((actual, None), (expected, torch.float32)):
        leaves = [tensor.to(dtype or tensor.dtype, copy=True).requires_grad_() for tensor in inputs]
        with torch.enable_grad():
            outputs = function(*leaves)
            grads = [_drawn(8 + number, *output.shape).to(output) for number, output in enumerate(outputs)]
            torch.autograd.backward(outputs, grads)
        results.append([*outputs, *(leaf.grad for leaf in leaves)])
    with torch.no_grad():
        plain = actual(*inputs)
    for result, wanted in [*zip(*results, strict=True), *zip(plain, results[1], strict=False)]:
        error = (result.detach().float() - wanted.detach()).abs().mean() / wanted.detach().std().clamp(min=1e-6)
        if not error <= tolerance:
            raise ValueError(f"fused kernels differ from PyTorch's operators: {float(error)} of their scale")
