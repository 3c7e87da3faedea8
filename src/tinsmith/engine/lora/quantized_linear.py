"""Products with a frozen 4-bit matrix of bitsandbytes, with the interface of `FrozenLinear`.

Both products dequantize the matrix for the moment that they take, so that forward and backward are those of one matrix
in the serving dtype, and adapters and gradients have nothing to do with the quantization.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tinsmith.engine.lora.matmul import FrozenLinear


def frozen_linear(module: nn.Linear | Conv1D) -> FrozenLinear | QuantizedLinear:
    """The frozen product of a linear module of the base."""
    bias = None if module.bias is None else module.bias.detach()
    if isinstance(module, nn.Linear) and "quant_state" in vars(module.weight):
        return QuantizedLinear(module.weight, bias, (module.out_features, module.in_features))
    weight = module.weight.detach()
    return FrozenLinear(weight.T if isinstance(module, Conv1D) else weight, bias)


class QuantizedLinear:
    """x W^T + b with W [out, in] in 4-bit blocks and b [out] or None."""

    reordered = False

    def __init__(self, weight: Any, bias: Tensor | None, shape: tuple[int, int]) -> None:
        """`weight` is a Params4bit of bitsandbytes."""
        self.shape, self.device = torch.Size(shape), weight.device
        self._weight, self._state, self._bias = weight.detach(), weight.quant_state, bias
        self.dtype: torch.dtype = self._state.dtype
        self.products = 0
        """Number of products so far, which shows that a slow pass does not hang."""

    def float32(self) -> FrozenLinear:
        """A float32 copy of the dequantized matrix."""
        return FrozenLinear(self._matrix().float(), None if self._bias is None else self._bias.float())

    def reorder(self, *, backward: bool = True) -> QuantizedLinear:
        """Leave the matrix as it is: only plain ones are reordered."""
        del backward
        return self

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [R, in] -> rows W^T + b [R, out], in new memory."""
        self.products += 1
        return nn.functional.linear(rows, self._matrix().to(rows.dtype), self._bias)

    def backward(self, grads: Tensor, onto: Tensor | None = None) -> Tensor:
        """grads [R, out] -> grads W [R, in], added to `onto` if given, whose memory may be reused."""
        self.products += 1
        matrix = self._matrix().to(grads.dtype)
        return grads @ matrix if onto is None else onto.addmm_(grads, matrix)

    def _matrix(self) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit  # pyright: ignore[reportMissingImports]

        return dequantize_4bit(self._weight, self._state)
