"""Kernels and rounding for the whole process: set before the first pass, so that nothing is compiled twice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

SUM_BLOCK = 256
"""Numbers in a block of a cumulative sum on a GPU."""


def set_matmul_precision(dtype: torch.dtype) -> None:
    """Set how float32 products round, for the whole process: exactly on CPUs, and on GPUs as TF32 if the base model is
    bfloat16. TF32 represents the head's factors, which are then bfloat16 values, exactly, and accumulates in float32.
    """
    narrow = dtype == torch.bfloat16
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cuda.matmul.fp32_precision = "tf32" if narrow else "ieee"
    # cuDNN, which comes first on Hopper and Blackwell, builds a plan of up to 0.4 s for each new shape, and nearly
    # every decoding step and cached prefix has a shape of its own.
    torch.backends.cuda.enable_cudnn_sdp(False)


def dtype_name(dtype: torch.dtype) -> str:
    """The name that settings and cards give a data type, such as float32."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 exactly within the context, whatever an engine of this process has set."""
    backends: tuple[Any, ...] = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul  # pyright: ignore[reportAttributeAccessIssue]
    previous = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, before in zip(backends, previous, strict=True):
            backend.fp32_precision = before


def use_deterministic_kernels(device: torch.device) -> None:
    """On a GPU, take the deterministic variant of every kernel; one that has none raises. CPU kernels are."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def cumulative_sum(values: Tensor, dim: int = 1) -> Tensor:
    """The cumulative sums of floating-point `values` along `dim`, added in float64, without a graph.

    PyTorch's own has no deterministic kernel on GPUs, where sums of blocks are products with a triangle. NumPy's on a
    CPU adds in the order and the precision of PyTorch's: the bits are the same.
    """
    wide = values.detach().double()
    if wide.device.type == "cpu":
        return torch.from_numpy(np.cumsum(wide.numpy(), axis=dim)).to(values.dtype)
    return _by_products(wide.movedim(dim, -1)).movedim(-1, dim).to(values.dtype)


def _by_products(values: Tensor) -> Tensor:
    """Cumulative sums of float64 [..., N]. Unlike sums in order, one may be a rounding error below the one before."""
    length = values.shape[-1]
    blocks = torch.nn.functional.pad(values, (0, -length % SUM_BLOCK)).unflatten(-1, (-1, SUM_BLOCK))
    sums = blocks @ torch.ones(SUM_BLOCK, SUM_BLOCK, dtype=values.dtype, device=values.device).triu_()
    if blocks.shape[-2] > 1:
        totals = sums[..., -1]
        sums = sums + (_by_products(totals) - totals)[..., None]
    return sums.flatten(-2)[..., :length]
