"""The products of the output head: hidden states with its weights, and what adapters add, in float32.

If the base is bfloat16, both factors are bfloat16 values, whose products float32 represents; all forms add in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.cpu import openmp
from tinsmith.engine.cpu.instructions import kind_of
from tinsmith.engine.lora.compiled_projections import MULTIPLE_WIDTH, Panels
from tinsmith.engine.lora.matmul import FrozenLinear
from tinsmith.engine.model.memory import from_heap

FEW_ROWS = 16
"""Rows whose products take as long as reading the weights, which compiled functions read in two bytes each."""


@dataclass(frozen=True, slots=True)
class Addition:
    """What an adapter adds to the products of the rows from start to stop: scale B A x."""

    start: int
    stop: int
    a: Tensor
    """float32 [rank, D]."""
    b: Tensor
    """float32 [V, rank]."""
    scale: float

    def add_to(self, products: Tensor, hidden: Tensor) -> None:
        """products [R, V] of hidden states [R, D]."""
        narrow = hidden[self.start : self.stop].float() @ self.a.T
        products[self.start : self.stop].addmm_(narrow, self.b.T, alpha=self.scale)


class HeadProducts(Protocol):
    """The products of one head."""

    def __call__(self, hidden: Tensor, additions: Sequence[Addition] = ()) -> Tensor:
        """hidden [R, D] -> float32 [R, V], with the head's bias; additions are of rising rows."""
        ...

    def backward(self, logits_grad: Tensor) -> Tensor:
        """logits_grad [R, V] -> hidden grad [R, D], in the base's dtype."""
        ...


class MixedProducts:
    """Products in the weights' own dtype with a float32 result, on GPUs."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, hidden: Tensor, additions: Sequence[Addition] = ()) -> Tensor:
        """See `HeadProducts`."""
        products = torch.mm(hidden, self._weight.T, out_dtype=torch.float32)
        if self._bias is not None:
            products.add_(self._bias)
        for addition in additions:
            addition.add_to(products, hidden)
        return products

    def backward(self, logits_grad: Tensor) -> Tensor:
        """See `HeadProducts`."""
        return logits_grad @ self._weight


class CompiledProducts:
    """Products by `cpu.logits`, forward with weights that are laid out for it: of bfloat16 without a float32 copy of
    them, in half of the time. The logits of a row do not depend on how many rows there are."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` is [V, D], and D a multiple of 8."""
        missing = -len(weight) % MULTIPLE_WIDTH
        padded = torch.cat([weight, weight.new_zeros(missing, weight.shape[1])]) if missing else weight
        self._panels = Panels.of(padded, backward=False)
        self._weight, self._bias = weight, bias

    def __call__(self, hidden: Tensor, additions: Sequence[Addition] = ()) -> Tensor:
        """See `HeadProducts`."""
        from tinsmith.engine.cpu import logits

        assert hidden.dtype == self._panels.dtype
        hidden, words, kind = hidden.contiguous(), len(self._weight), kind_of(hidden.dtype)
        with from_heap(4 * len(hidden) * words):
            products = torch.empty(len(hidden), words, device=hidden.device)
        factors = [_Factors.of(each, products.device) for each in additions]
        spans = np.array(_spans(len(hidden), factors), logits.SPAN)
        call = np.zeros(1, logits.PRODUCT)
        call["rows"], call["width"], call["words"] = *hidden.shape, words
        call["hidden"], call["weights"] = hidden.data_ptr(), self._panels.forward.data_ptr()
        call["storage"] = self._panels.storage
        call["logits"], call["spans"], call["span_table"] = products.data_ptr(), len(spans), spans.ctypes.data
        call["most_rank"] = spans["rank"].max(initial=0)
        if factors:
            openmp.run(logits.narrow_function(kind), call.ctypes.data, min(len(spans), torch.get_num_threads()))
            call["next"] = 0
        openmp.run(logits.logits_function(kind), call.ctypes.data, torch.get_num_threads())
        return products if self._bias is None else products.add_(self._bias)

    def backward(self, logits_grad: Tensor) -> Tensor:
        """See `HeadProducts`. Each part of the vocabulary has sums of its own, so that the result does not depend on
        which thread is first."""
        from tinsmith.engine.cpu import logits

        words, width = self._weight.shape
        kind = kind_of(logits_grad.dtype)
        if (kind == "pairs" and words % 2) or width % logits.TILE_COLUMNS:
            return logits_grad @ self._weight
        logits_grad, weight = logits_grad.contiguous(), self._weight.contiguous()
        sums = torch.zeros(logits.PARTS, len(logits_grad), width, device=logits_grad.device)
        call = np.zeros(1, logits.BACKWARD)
        call["rows"], call["width"], call["words"], call["parts"] = len(logits_grad), width, words, len(sums)
        call["logit_grads"], call["weights"], call["sums"] = logits_grad.data_ptr(), weight.data_ptr(), sums.data_ptr()
        openmp.run(logits.backward_function(kind), call.ctypes.data, torch.get_num_threads())
        return sums.sum(0).to(self._weight.dtype)


class Float32Products:
    """Products with a float32 copy of the weights, on CPUs."""

    def __init__(self, weight: Tensor, bias: Tensor | None, few: HeadProducts | None = None) -> None:
        """`few` computes the products of few rows, which are float32."""
        self._weight, self._few = weight, few
        self._frozen = FrozenLinear(weight.float(), bias).reorder(backward=False)

    def __call__(self, hidden: Tensor, additions: Sequence[Addition] = ()) -> Tensor:
        """See `HeadProducts`."""
        if self._few is not None and len(hidden) <= FEW_ROWS:
            return self._few(hidden.float(), additions)
        products = self._frozen(hidden.float())
        for addition in additions:
            addition.add_to(products, hidden)
        return products

    def backward(self, logits_grad: Tensor) -> Tensor:
        """See `HeadProducts`."""
        return logits_grad @ self._weight


@dataclass(frozen=True, slots=True)
class _Factors:
    """An addition's matrices with the numbers of a row side by side, and room for A x."""

    addition: Addition
    a: Tensor
    b: Tensor
    narrow: Tensor

    @classmethod
    def of(cls, addition: Addition, device: torch.device) -> _Factors:
        narrow = torch.empty(addition.stop - addition.start, len(addition.a), device=device)
        return cls(addition, addition.a.contiguous(), addition.b.contiguous(), narrow)


def _spans(rows: int, factors: Sequence[_Factors]) -> list[tuple[int | float, ...]]:
    """`logits.SPAN` of all rows."""
    spans, end = list[tuple[int | float, ...]](), 0
    for each in factors:
        start, stop, scale = each.addition.start, each.addition.stop, each.addition.scale
        spans += [(end, start, 0, 0, 0, 0, 0)] * (end < start)
        spans.append((start, stop, len(each.a), scale, each.a.data_ptr(), each.b.data_ptr(), each.narrow.data_ptr()))
        end = stop
    return [*spans, *[(end, rows, 0, 0, 0, 0, 0)] * (end < rows)]
