"""Shapes at which the fused kernels are compared and compiled: `python -m tests.engine.lora.fused_cases NAME`.

Interpreted: odd widths, one number, zero and float32 weights, partial rotation, more heads than a program rotates.
Compiled: widths of models, in bfloat16 over a float32 residual.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.engine.triton_programs import assert_compiles
from tinsmith.engine.lora.elementwise import choice, fused

POINTERS = {
    "total": "*fp32",
    "inputs": "*fp32",
    "total_grad": "*fp32",
    "grad": "*fp32",
    "inputs_grad": "*fp32",
    "inverse_rms": "*fp32",
}
"""Types of arguments that are not bfloat16."""


def norm(like: Tensor, width: int, weight_dtype: torch.dtype | None = None, *, zeros: bool = False) -> fused.Norm:
    """A norm with random weights, some of which are zero if `zeros`."""
    weight = torch.randn(width, generator=torch.Generator().manual_seed(9)).to(like.device, weight_dtype or like.dtype)
    if zeros:
        weight[::3] = 0
    return fused.Norm(weight, 1e-6, like.dtype, not zeros)


def check(kernels: fused.Kernels, like: Tensor) -> None:
    """Raises ValueError unless the kernels equal PyTorch's operators, with the dtype and device of `like`."""
    for width in (2, 97, 128):
        for zeros in (False, True):
            choice.check_norm(kernels, norm(like, width, zeros=zeros))
    choice.check_norm(kernels, norm(like, 40, torch.float32))
    choice.check_norm(kernels, fused.Norm(torch.zeros(8).to(like), 1e-6, like.dtype, invertible=False))
    for heads, rotary in (((3, 16), 16), ((5, 24), 24), ((3, 20), 6), ((33, 64), 64)):
        for each in (None, norm(like, heads[1]), norm(like, heads[1], zeros=True)):
            choice.check_rotation(kernels, heads, each, rotary, like)
    for width in (1, 7, 500):
        choice.check_gate(kernels, width, like)
    for width in (2, 20, 128):
        choice.check_gated_norm(kernels, norm(like, width, zeros=True).weight, 1e-6, like.dtype)


def interpreted() -> None:
    """Compare Triton's kernels in its interpreter."""
    from tinsmith.engine.lora.elementwise import gpu_kernels as kernels

    for dtype in (torch.float32, torch.bfloat16):
        check(kernels, torch.empty(0, dtype=dtype))


def compiled() -> None:
    """Compile Triton's kernels for sm_80 and sm_90."""
    for capability in (80, 90):
        for kernel, constants in _variants():
            _compile(kernel, constants, capability)


def _variants() -> Iterator[tuple[Any, dict[str, Any]]]:
    from tinsmith.engine.lora.elementwise import gpu_kernels as kernels

    for width in (2560, 16384):
        settings = kernels.row_settings(width)
        yield kernels.add_norm_kernel, settings
        yield kernels.add_norm_kernel, {"addition": None, "total": None, **settings}
        yield kernels.add_norm_backward_kernel, {"FROM_OUTPUT": True, **settings}
        yield kernels.add_norm_backward_kernel, {"FROM_OUTPUT": False, "addition_grad": None, **settings}
    for shape, rotary in (((1, 32, 128), 128), ((1, 14, 64), 64), ((1, 16, 256), 64)):
        _, settings = kernels.head_settings(torch.empty(shape), torch.empty(1, rotary))
        yield kernels.rotate_kernel, {"DIRECTION": 1, **settings}
        yield kernels.rotate_kernel, {"DIRECTION": -1, "weight": None, **settings}
        yield kernels.rotate_backward_kernel, settings
    _, settings = kernels.gate_settings(torch.empty(1))
    yield kernels.silu_mul_kernel, settings
    yield kernels.silu_mul_backward_kernel, settings
    _, settings = kernels.rows_settings(torch.empty(1, 128))
    yield kernels.gated_norm_kernel, settings
    yield kernels.gated_norm_backward_kernel, settings


def _compile(kernel: Any, constants: dict[str, Any], capability: int) -> None:
    types = {name: _type(name) for name in kernel.arg_names if name not in constants}
    assert_compiles(kernel, types, constants, capability)


def _type(name: str) -> str:
    if name == "eps":
        return "fp32"
    return "i32" if name in ("size", "rows") or name.endswith("stride") else POINTERS.get(name, "*bf16")


if __name__ == "__main__":
    {"interpreted": interpreted, "compiled": compiled}[sys.argv[1]]()
