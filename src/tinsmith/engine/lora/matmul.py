"""Products with a frozen matrix, which on CPUs is laid out once, for compiled functions or in oneDNN's own layout.

PyTorch reorders the matrix at every call. With the matrix reordered beforehand, a product of 8 rows takes 0.55 of the
time in bfloat16, one of 64 rows 0.8 and one of 1,024 rows 0.96 (benchmarks/NOTES.md). The backward needs the transposed
matrix: oneDNN's layout of it, or panels that are kept or made again each time, as `autotune` chooses by the memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinsmith.engine.lora.compiled_projections import Panels, ProjectionCall, rows_of

LAYOUT_ROWS = 128
"""The number of rows that oneDNN chooses the layout for; products of any number of rows work."""


class FrozenLinear:
    """x W^T + b with W [out, in] and b [out] or None. Computes as PyTorch does until it is reordered."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self._weight, self._bias = weight, bias
        self._transposed: Tensor | None = None
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

    def lay_out(self, *, backward: bool = True) -> None:
        """Lay the matrix out for compiled functions, whose widths it has (`fit`); for gradients of inputs too, if
        `backward`."""
        if not self.reordered:
            self.reordered, self.panels = True, Panels.of(self._weight, self._bias, backward=backward)
            self._weight = self.panels.forward  # frees the plain matrix

    def reorder(self, *, backward: bool = True) -> FrozenLinear:
        """Reorder the matrix in place if this device gains from it, for the backward too if `backward`; returns
        self."""
        if self.device.type == "cpu" and _can_reorder(self.dtype) and not self.reordered:
            plain, self.reordered = self._weight, True
            self._weight = torch.ops.mkldnn._reorder_linear_weight(plain, LAYOUT_ROWS)
            if backward:
                self._transposed = torch.ops.mkldnn._reorder_linear_weight(plain.T.contiguous(), LAYOUT_ROWS)
        return self

    @property
    def is_half(self) -> bool:
        """Whether two bytes represent each weight of a float32 matrix that is not reordered."""
        return any(
            torch.equal(self._weight.to(dtype).float(), self._weight) for dtype in (torch.bfloat16, torch.float16)
        )

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [R, in] -> rows W^T + b [R, out], in new memory."""
        self.products += 1
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


def _can_reorder(dtype: torch.dtype) -> bool:
    """Whether oneDNN is available and, for bfloat16, the processor's instructions too (AVX2 alone is not enough)."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
