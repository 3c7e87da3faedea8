"""Products with a matrix that never changes, on CPUs ordered once as oneDNN likes to read it.

PyTorch's own product orders the matrix anew at each call, and in float32 goes to a library that is slow on some CPUs
(AMD's). Ordered beforehand, a product of 8 rows takes 0.55 of the time in bfloat16, one of 64 rows 0.8 and one of 1,024
rows 0.96; in float32 0.6 to 0.9 (benchmarks/NOTES.md). The way back wants the matrix transposed, so both orders take
twice the memory of one matrix: who is short of it leaves matrices as they are. Left out: gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 128
"""The height of product that the order is chosen for; any other works too."""


class Fixed:
    """weight [out, in], bias [out] or None. Computes as PyTorch does until it is ordered."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self._weight, self._bias = weight, bias
        self._back: Tensor | None = weight
        self.ordered = False

    def widened(self) -> Fixed:
        """The same in float32, for one that is not ordered."""
        assert not self.ordered
        return Fixed(self._weight.float(), None if self._bias is None else self._bias.float())

    def order(self, *, back: bool = True) -> Fixed:
        """The same matrix, ordered if that is of use here; `back` is whether it will be asked for the way back."""
        useful = self.device.type == "cpu" and _can_order(self.dtype)
        if useful and not self.ordered:
            plain, self.ordered = self._weight, True
            self._weight = torch.ops.mkldnn._reorder_linear_weight(plain, ROWS)
            self._back = torch.ops.mkldnn._reorder_linear_weight(plain.T.contiguous(), ROWS) if back else None
        return self

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [R, in] -> rows @ weight.T + bias [R, out], in memory of its own."""
        if self.ordered:
            return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return torch.nn.functional.linear(rows, self._weight, self._bias)

    def back(self, slopes: Tensor, onto: Tensor | None = None) -> Tensor:
        """slopes [R, out] -> slopes @ weight [R, in], added to `onto`, which may be used up."""
        if not self.ordered:
            return slopes @ self._weight if onto is None else onto.addmm_(slopes, self._weight)
        assert self._back is not None
        if onto is None:
            return torch.ops.mkldnn._linear_pointwise(slopes, self._back, None, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(slopes, onto, self._back, None, "add")


def _can_order(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and, for bfloat16, the processor's instructions too (AVX2 alone does not do)."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
