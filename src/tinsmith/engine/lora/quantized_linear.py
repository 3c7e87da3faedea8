"""Products with a frozen 4-bit matrix of bitsandbytes, with the interface of `FrozenLinear`.

Both products decode the matrix for the moment that they take, so that forward and backward are those of one matrix in
the serving dtype, and adapters and gradients have nothing to do with the quantization. A forward with a backward keeps
the decoded matrix for it where there is memory. Few rows whose matrix is not kept are left to bitsandbytes, which
multiplies with the blocks themselves where it has a kernel for that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tinsmith.engine.lora.matmul import FrozenLinear

FEW_ROWS = 16
"""At most so many rows are few."""


def frozen_linear(module: nn.Linear | Conv1D) -> FrozenLinear | QuantizedLinear:
    """The frozen product of a linear module of the base."""
    bias = None if module.bias is None else module.bias.detach()
    if isinstance(module, nn.Linear) and "quant_state" in vars(module.weight):
        return QuantizedLinear(module.weight, bias, (module.out_features, module.in_features))
    weight = module.weight.detach()
    return FrozenLinear(weight.T if isinstance(module, Conv1D) else weight, bias)


class DecodedMemory:
    """Memory for matrices that stay decoded from a forward to its backward; shared by the products of a model."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Bytes."""
        self.taken = 0
        self._changing = threading.RLock()  # a matrix may be freed, and give back, while another takes

    def take(self, size: int) -> bool:
        """Whether there is room for so many bytes, which are taken then."""
        with self._changing:
            has_room = self.taken + size <= self.limit
            self.taken += size * has_room
        return has_room

    def give_back(self, size: int) -> None:
        """Free bytes that were taken."""
        with self._changing:
            self.taken -= size


def keep_decoded(products: Iterable[object], limit: int) -> None:
    """Let the 4-bit ones of these products keep decoded matrices of at most `limit` bytes."""
    memory = DecodedMemory(limit)
    for product in products:
        if isinstance(product, QuantizedLinear):
            product.memory = memory


class QuantizedLinear:
    """x W^T + b with W [out, in] in 4-bit blocks and b [out] or None."""

    reordered = False

    def __init__(self, weight: Any, bias: Tensor | None, shape: tuple[int, int]) -> None:
        """`weight` is a Params4bit of bitsandbytes."""
        self.shape, self.device = torch.Size(shape), weight.device
        self._weight, self._state, self._bias = weight.detach(), weight.quant_state, bias
        self.dtype: torch.dtype = self._state.dtype
        self.memory = DecodedMemory(0)
        self.products = 0
        """Number of products so far, which shows that a slow pass does not hang."""

    def float32(self) -> FrozenLinear:
        """A float32 copy of the dequantized matrix."""
        return FrozenLinear(self._matrix().float(), None if self._bias is None else self._bias.float())

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [R, in] -> rows W^T + b [R, out], in new memory."""
        if len(rows) <= FEW_ROWS and rows.dtype == self.dtype:
            self.products += 1
            return self._few(rows)
        return self.product(rows, self._matrix())

    def backward(self, grads: Tensor, onto: Tensor | None = None) -> Tensor:
        """grads [R, out] -> grads W [R, in], added to `onto` if given, whose memory may be reused."""
        return self.gradient(grads, onto, self._matrix())

    def for_backward(self) -> QuantizedLinear | DecodedLinear:
        """These products for one forward and its backward: with a matrix that stays decoded, if there is room."""
        size = self.shape.numel() * self.dtype.itemsize
        return DecodedLinear(self, self._matrix(), size) if self.memory.take(size) else self

    def product(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """The forward with the decoded matrix."""
        self.products += 1
        return nn.functional.linear(rows, matrix.to(rows.dtype), self._bias)

    def gradient(self, grads: Tensor, onto: Tensor | None, matrix: Tensor) -> Tensor:
        """The backward with the decoded matrix."""
        self.products += 1
        matrix = matrix.to(grads.dtype)
        return grads @ matrix if onto is None else onto.addmm_(grads, matrix)

    def _few(self, rows: Tensor) -> Tensor:
        from bitsandbytes import matmul_4bit  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]

        with torch.no_grad():
            return matmul_4bit(rows, self._weight.t(), self._state, bias=self._bias)  # type: ignore[no-any-return]

    def _matrix(self) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit  # pyright: ignore[reportMissingImports]

        return dequantize_4bit(self._weight, self._state)


class DecodedLinear:
    """The products of a QuantizedLinear with a matrix that is decoded as long as this object lives."""

    def __init__(self, source: QuantizedLinear, matrix: Tensor, size: int) -> None:
        self._source, self._matrix = source, matrix
        weakref.finalize(self, source.memory.give_back, size)

    def __call__(self, rows: Tensor) -> Tensor:
        """As QuantizedLinear."""
        return self._source.product(rows, self._matrix)

    def backward(self, grads: Tensor, onto: Tensor | None = None) -> Tensor:
        """As QuantizedLinear."""
        return self._source.gradient(grads, onto, self._matrix)
