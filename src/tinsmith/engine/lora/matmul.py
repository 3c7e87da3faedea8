"""Products with a frozen matrix, which on CPUs is reordered once into oneDNN's own layout.

PyTorch reorders the matrix at every call, and in float32 it calls a library that is slow on some CPUs (AMD's). With the
matrix reordered beforehand, a product of 8 rows takes 0.55 of the time in bfloat16, one of 64 rows 0.8 and one of 1,024
rows 0.96; in float32 0.6 to 0.9 (benchmarks/NOTES.md). The backward needs the transposed matrix, so the two layouts
take twice the memory of one matrix; `autotune` leaves matrices as they are where memory is short.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUT_ROWS = 128
"""The number of rows that oneDNN chooses the layout for; products of any number of rows work."""


class FrozenLinear:
    """x W^T + b with W [out, in] and b [out] or None. Computes as PyTorch does until it is reordered."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self._weight, self._bias = weight, bias
        self._transposed: Tensor | None = None
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

    def reorder(self, *, backward: bool = True) -> FrozenLinear:
        """Reorder the matrix in place if this device gains from it, for the backward too if `backward`; returns
        self.
        """
        useful = self.device.type == "cpu" and _can_reorder(self.dtype)
        if useful and not self.reordered:
            plain, self.reordered = self._weight, True
            self._weight = torch.ops.mkldnn._reorder_linear_weight(plain, LAYOUT_ROWS)
            if backward:
                self._transposed = torch.ops.mkldnn._reorder_linear_weight(plain.T.contiguous(), LAYOUT_ROWS)
        return self

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [R, in] -> rows W^T + b [R, out], in new memory."""
        self.products += 1
        if self.reordered:
            return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return torch.nn.functional.linear(rows, self._weight, self._bias)

    def backward(self, grads: Tensor, onto: Tensor | None = None) -> Tensor:
        """grads [R, out] -> grads W [R, in], added to `onto` if given, whose memory may be reused."""
        self.products += 1
        if not self.reordered:
            return grads @ self._weight if onto is None else onto.addmm_(grads, self._weight)
        assert self._transposed is not None
        if onto is None:
            return torch.ops.mkldnn._linear_pointwise(grads, self._transposed, None, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(grads, onto, self._transposed, None, "add")


def _can_reorder(dtype: torch.dtype) -> bool:
    """Whether oneDNN is available and, for bfloat16, the processor's instructions too (AVX2 alone is not enough)."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
