"""Products with a frozen matrix, which on CPUs is reordered once, for compiled functions or into oneDNN's own layout.

PyTorch reorders the matrix at every call, and in float32 it calls a library that is slow on some CPUs (AMD's). With the
matrix reordered beforehand, a product of 8 rows takes 0.55 of the time in bfloat16, one of 64 rows 0.8 and one of 1,024
rows 0.96; in float32 0.6 to 0.9 (benchmarks/NOTES.md). The backward needs the transposed matrix, so the two layouts
take twice the memory of one matrix; `autotune` leaves matrices as they are where memory is short.

A float32 product of few rows takes as long as reading the matrix. Most checkpoints are bfloat16 or float16, so float16
represents their weights; such a matrix is also packed as float16 for FBGEMM, which widens it in registers: 0.68 of the
time for one row, 0.74 for 8, 0.88 for 16, and the same result but for the order of the sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tinsmith.engine.lora.compiled_projections import Panels, ProjectionCall, fit, rows_of

LAYOUT_ROWS = 128
"""The number of rows that oneDNN chooses the layout for; products of any number of rows work."""

FLOAT16_ROWS = 16
"""Products of up to this many rows read the float16 copy of a reordered matrix."""

PLAIN_FLOAT16_ROWS = 96
"""The same of a plain matrix, whose products are slower: those of 64 rows take 0.7 to 0.85 of the time."""

LARGE_FLOAT32 = 100_000
"""Weights of the smallest float32 matrix that is reordered or packed: smaller ones stay in the processor's cache, and
oneDNN needs 20 microseconds for any product, most of the time of one with such a matrix."""

FLOAT16_ERROR = 2.0**-24
"""The norm of the rounding errors of float16 may be this part of a matrix's own norm: float32 products round as
much."""


class FrozenLinear:
    """x W^T + b with W [out, in] and b [out] or None. Computes as PyTorch does until it is reordered."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self._weight, self._bias = weight, bias
        self._transposed: Tensor | None = None
        self._float16: Any = None
        self.panels: Panels | None = None
        """The matrix as compiled functions read it, in place of any other form."""
        self.reordered = False
        self.products = 0
        """Number of products so far, which shows that a slow pass does not hang."""

    def float32(self) -> FrozenLinear:
        """A float32 copy; only of one that is not reordered."""
        assert not self.reordered
        return FrozenLinear(self._weight.float(), None if self._bias is None else self._bias.float())

    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """The matrix and the bias; only of one that is not reordered."""
        assert not self.reordered
        return self._weight, self._bias

    def reorder(self, *, backward: bool = True, panels: bool = False) -> FrozenLinear:
        """Reorder the matrix in place if this device gains from it, for the backward too if `backward`; returns
        self. `panels`: whether compiled functions multiply fastest, where they can.
        """
        useful = self.device.type == "cpu" and _can_reorder(self.dtype)
        if panels and not self.reordered and fit(self.shape):
            self.reordered, self.panels = True, Panels.of(self._weight, self._bias, backward=backward)
            self._weight = self.panels.forward  # frees the plain matrix
        elif useful and not self.reordered:
            plain, self.reordered = self._weight, True
            self._weight = torch.ops.mkldnn._reorder_linear_weight(plain, LAYOUT_ROWS)
            if backward:
                self._transposed = torch.ops.mkldnn._reorder_linear_weight(plain.T.contiguous(), LAYOUT_ROWS)
        return self

    def fits_float16(self) -> bool:
        """Whether products of few rows gain from a float16 copy, and it represents the matrix."""
        large = self.device.type == "cpu" and self.shape.numel() >= LARGE_FLOAT32
        return large and self.dtype == torch.float32 and not self.reordered and _is_float16(self._weight)

    def keep_float16(self) -> None:
        """Keep a float16 copy; only of a matrix that fits."""
        self._float16 = torch.ops.quantized.linear_prepack_fp16(self._weight, self._bias)

    @property
    def has_float16(self) -> bool:
        """Whether products of few rows read a float16 copy."""
        return self._float16 is not None

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [R, in] -> rows W^T + b [R, out], in new memory."""
        self.products += 1
        if self.has_float16 and len(rows) <= (FLOAT16_ROWS if self.reordered else PLAIN_FLOAT16_ROWS):
            return torch.ops.quantized.linear_dynamic_fp16(rows, self._float16)
        if self.panels is not None:
            output = rows.new_empty(len(rows), self.shape[0])
            ProjectionCall(rows_of(rows), [output], [self.panels], None).fill_outputs()
            return output
        if self.reordered:
            return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return torch.nn.functional.linear(rows, self._weight, self._bias)

    def backward(self, grads: Tensor, onto: Tensor | None = None) -> Tensor:
        """grads [R, out] -> grads W [R, in], added to `onto` if given, whose memory may be reused."""
        self.products += 1
        if not self.reordered:
            return grads @ self._weight if onto is None else onto.addmm_(grads, self._weight)
        if self.panels is not None:
            result = grads.new_empty(len(grads), self.shape[1]) if onto is None else onto
            call = ProjectionCall(result, [rows_of(grads)], [self.panels], None)
            call.fill_input_grads(adds=onto is not None)
            return result
        assert self._transposed is not None
        if onto is None:
            return torch.ops.mkldnn._linear_pointwise(grads, self._transposed, None, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(grads, onto, self._transposed, None, "add")


def pack_float16(matrices: Iterable[FrozenLinear]) -> None:
    """Give large float32 matrices that float16 represents a copy for products of few rows; before `reorder`.

    Packing takes 6 ns a weight, so each thread packs one matrix at a time.
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return
    fitting = [matrix for matrix in matrices if matrix.fits_float16()]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(FrozenLinear.keep_float16, fitting):
            pass


def _is_float16(weight: Tensor) -> bool:
    """Whether float16 represents the weights as exactly as float32 products need them."""
    error = weight.half().float().sub_(weight)
    return bool(error.norm() <= FLOAT16_ERROR * weight.norm())  # False where one is not finite or out of range


def _can_reorder(dtype: torch.dtype) -> bool:
    """Whether oneDNN is available and, for bfloat16, the processor's instructions too (AVX2 alone is not enough)."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
