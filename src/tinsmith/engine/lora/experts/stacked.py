"""The matrices of all adapters of a pass at a mixture's sites as one tensor, for grouped products.

Stacks are made in each call, because they are as large as the adapters themselves. Those of one adapter of a rank that
needs no padding are its own matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from tinsmith.engine.lora.adapter import AdapterWeights, LoraPair
from tinsmith.engine.lora.experts.separate import is_separate
from tinsmith.engine.lora.grouped_adapters import ALIGNMENT


@dataclass(frozen=True, slots=True)
class StackedAdapters:
    """Adapters by number, whose experts all share matrices, or all have their own."""

    weights: tuple[AdapterWeights | None, ...]
    """None for tokens without an adapter, and for adapters of the other kind: their matrices are zeros."""
    separate: bool
    """Whether the experts share no matrix."""
    rank: int
    """Padded, of all of them."""

    @property
    def has_gradients(self) -> bool:
        return any(weights.gradients for weights in self.weights if weights is not None)

    def a(self, names: Sequence[str]) -> Tensor:
        """A of these sites, below each other: [E adapters, sites * rank, in], or [adapters, …] of shared matrices."""
        matrices = [self._stacked(name, "a") for name in names]
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim=1)

    def b(self, name: str) -> Tensor:
        """B of a site: [E adapters, out, rank], or [adapters, …] of shared matrices."""
        return self._stacked(name, "b")

    def add_gradients(self, name: str, side: Literal["a", "b"], sums: Tensor) -> None:
        """Add sums in the shape of `a` or `b` of a site to the gradient buffers."""
        by_adapter = sums.unflatten(0, (-1, len(self.weights))).transpose(0, 1)
        exact = by_adapter.to(torch.float32, memory_format=torch.contiguous_format)
        buffers, grads = list[Tensor](), list[Tensor]()
        for weights, grad in zip(self.weights, exact.unbind(), strict=True):
            if weights is not None and weights.gradients:
                buffers.append(_side(weights.gradients[name], side))
                rows, columns = buffers[-1].shape[-2:]
                grads.append(grad[..., :rows, :columns])
        torch._foreach_add_(buffers, grads)  # pyright: ignore[reportPrivateImportUsage]

    def _stacked(self, name: str, side: Literal["a", "b"]) -> Tensor:
        parts = list(self._parts(name, side))
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).flatten(0, 1)

    def _parts(self, name: str, side: Literal["a", "b"]) -> Iterator[Tensor]:
        """The matrices of neighbours of one rank [E, n, …], padded."""
        present = next(_side(weights.pairs[name], side) for weights in self.weights if weights is not None)
        shape = list(present.shape[1:])
        shape[0 if side == "a" else 1] = self.rank
        for rank, members in groupby(self.weights, key=lambda weights: 0 if weights is None else _rank(weights, name)):
            matrices = [None if weights is None else _side(weights.pairs[name], side) for weights in members]
            tensors = [matrix for matrix in matrices if matrix is not None]
            if not tensors:
                yield present.new_zeros(len(present), len(matrices), *shape)
                continue
            stacked = tensors[0][:, None] if len(tensors) == 1 else torch.stack(tensors, dim=1)
            missing = self.rank - rank
            yield pad(stacked, (0, 0, 0, missing) if side == "a" else (0, missing)) if missing else stacked


def stacked_adapters(weights: Sequence[AdapterWeights | None], down_name: str) -> tuple[StackedAdapters, ...]:
    """The adapters of each kind that is present."""
    kinds = []
    for separate in (False, True):
        members = tuple(
            each if each is not None and is_separate(each, down_name) is separate else None for each in weights
        )
        ranks = [_rank(each, down_name) for each in members if each is not None]
        if ranks:
            kinds.append(StackedAdapters(members, separate, -(-max(ranks) // ALIGNMENT) * ALIGNMENT))
    return tuple(kinds)


def _rank(weights: AdapterWeights, name: str) -> int:
    return weights.pairs[name].a.shape[-2]


def _side(pair: LoraPair, side: Literal["a", "b"]) -> Tensor:
    return pair.a if side == "a" else pair.b
