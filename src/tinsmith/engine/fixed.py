"""Products with a matrix that never changes, float32, ordered once as oneDNN likes to read it.

PyTorch's own float32 product orders the matrix anew at each call, and on some CPUs (AMD's) goes to a slow library.
Ordered beforehand, products of 8 to 128 rows take 0.7 to 0.9 of the time where the values are bfloat16, and 0.6
where they are float32 (benchmarks/NOTES.md). Elsewhere than on a CPU with oneDNN it is PyTorch's own product. Left out:
gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 128
"""The height of product that the order is chosen for; any other works too."""


class Fixed:
    """weight float32 [out, in]; called with rows [R, in] it returns rows @ weight.T in memory of its own."""

    def __init__(self, weight: Tensor) -> None:
        self._ordered = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS) if self._ordered else weight

    def __call__(self, rows: Tensor) -> Tensor:
        if self._ordered:
            return torch.ops.mkldnn._linear_pointwise(rows, self._weight, None, "none", [], "")
        return torch.nn.functional.linear(rows, self._weight)
