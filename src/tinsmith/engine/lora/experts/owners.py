"""The adapters of a pass by number and the tokens that each serves, for grouped products on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tinsmith.engine.lora.adapter import AdapterWeights, PlacedAdapter
from tinsmith.engine.lora.experts.separate import is_separate
from tinsmith.engine.lora.grouped_adapters import ALIGNMENT


@dataclass(frozen=True, slots=True)
class TokenOwners:
    """The adapter of each of T tokens by number, on the device."""

    count: int
    numbers: Tensor
    """int64 [T]."""
    ends: Tensor
    """int32 [count]: the end of each adapter's tokens, in the order of adapters."""
    order: Tensor | None
    """int64 [T]: tokens in the order of adapters; None if they are in it."""
    places: Tensor | None
    """int64 [T]: the inverse of `order`."""
    scales: Tensor | float
    """float32 [T, 1], or the scale of all."""

    def product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Rows of all tokens [T, in] times the matrix of their adapter of [count, in, out]."""
        if self.count == 1:
            return rows @ matrices[0]
        if self.order is None or self.places is None:
            return grouped_product(rows, matrices, self.ends)
        return grouped_product(rows[self.order], matrices, self.ends)[self.places]

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Sums over each adapter's tokens of the outer products of rows [T, m] and [T, n]: [count, m, n]."""
        if self.count == 1:
            return (left.T @ right)[None]
        if self.order is not None:
            left, right = left[self.order], right[self.order]
        return grouped_outer(left, right, self.ends)

    def scaled(self, rows: Tensor) -> Tensor:
        """Rows [T, R] times the scale of their adapter, in place."""
        return rows.mul_(self.scales)


def owners_of(
    placed: Sequence[PlacedAdapter], total: int, device: torch.device, down_name: str
) -> tuple[tuple[AdapterWeights | None, ...], TokenOwners]:
    """The adapters of a pass over `total` tokens, by kind and rank, and their tokens. The last is None if some tokens
    have no adapter."""
    present = [entry for entry in placed if entry[1] < entry[2]]
    if not present:  # made on the device, so that a CUDA graph of a decoding step copies nothing and holds it
        ends = torch.full((1,), total, dtype=torch.int32, device=device)
        return (None,), TokenOwners(1, torch.zeros(total, dtype=torch.int64, device=device), ends, None, None, 1.0)
    adapters = sorted(
        dict.fromkeys(weights for weights, _, _ in present),
        key=lambda weights: (is_separate(weights, down_name), weights.pairs[down_name].a.shape[-2]),
    )
    numbers = {weights: number for number, weights in enumerate(adapters)}
    spans = tuple((numbers[weights], start, stop) for weights, start, stop in present)
    owners = _token_owners(spans, tuple(weights.scale for weights in adapters), total, device)
    return (*adapters, *[None] * (owners.count - len(adapters))), owners


@lru_cache(maxsize=8)
def _token_owners(
    spans: tuple[tuple[int, int, int], ...], scales: tuple[float, ...], total: int, device: torch.device
) -> TokenOwners:
    """The layers of a pass, and passes over the same spans, have the same."""
    numbers = np.full(total, len(scales))
    for number, start, stop in spans:
        numbers[start:stop] = number
    count = int(numbers.max()) + 1
    order = np.argsort(numbers, kind="stable")
    in_order = np.array_equal(order, np.arange(total))
    row_scales = np.array([*scales, 1.0], np.float32)[numbers][:, None]

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return TokenOwners(
        count,
        on_device(numbers),
        on_device(np.cumsum(np.bincount(numbers, minlength=count)).astype(np.int32)),
        None if in_order else on_device(order),
        None if in_order else on_device(np.argsort(order)),
        scales[0] if len(set(scales)) == 1 else on_device(row_scales),
    )


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Each row of [P, in] times the matrix of its group of [groups, in, out]; the groups end at `ends`."""
    return functional.grouped_mm(_aligned(rows), _aligned(matrices), offs=ends)


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Sums over each group of the outer products of rows [P, m] and [P, n]: [groups, m, n]."""
    sums = functional.grouped_mm(_aligned(left).T, _aligned(right), offs=ends)
    is_empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0  # of which the kernel need not write the sums
    return sums.masked_fill_(is_empty[:, None, None], 0)


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, with its rows or columns at addresses that the kernel loads from."""
    others = [stride for stride in tensor.stride() if stride != 1]
    is_aligned = len(others) == tensor.dim() - 1 and not any(
        number % ALIGNMENT for number in (*others, tensor.storage_offset())
    )
    return tensor if is_aligned else tensor.clone(memory_format=torch.contiguous_format)
