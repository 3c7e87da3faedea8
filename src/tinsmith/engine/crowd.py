"""Many adapters with a few positions each, as batched products, so that cost goes by tokens and not by adapters.

One adapter after the other, 64 tenants with a row of 16 tokens would mean 80,000 products too small to be worth their
call. Here neighbours of one shape in a pass stand as a batch: their matrices are stacked for the product at hand and
dropped again. Where lengths differ, the shorter are filled up with copies of their last position, whose part is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tinsmith.engine.lora import Placed, Weights

LEAST = 4
"""Adapters; fewer go one by one."""

MOST_POSITIONS = 192
"""Of one adapter; more are worth a product of their own."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """Adapters of one shape, n of them, with up to L positions each."""

    weights: tuple[Weights, ...]
    index: Tensor
    """int64 [n, L]: packed positions; the shorter repeat their last."""
    real: Tensor | None
    """bool [n, L]: which are not repeated; None if all are real and stand side by side."""

    @property
    def trains(self) -> bool:
        return any(one.gradients for one in self.weights)

    def has(self, name: str) -> bool:
        return name in self.weights[0].pairs

    def add(self, inputs: Tensor, outputs: Sequence[Tensor], names: Sequence[str]) -> Tensor:
        """Add s B A x to the outputs [T, out]; returns A x of all projections side by side [n, L, ranks]."""
        narrow = torch.bmm(self._taken(inputs), self._stacked(names).mT)
        for name, output, piece in zip(names, outputs, narrow.chunk(len(names), dim=2), strict=True):
            self._put(output, torch.bmm(piece, self._b(name).mT))
        return narrow

    def add_back(
        self, into: Tensor, slopes: Sequence[Tensor], names: Sequence[str], inputs: Tensor | None, narrow: Tensor | None
    ) -> None:
        """Add to the gradient of the inputs; and, where inputs and narrow are given, to the adapters' own."""
        taken = [self._taken(slope) for slope in slopes]
        if self.real is not None:
            taken = [slope * self.real[..., None] for slope in taken]
        thin = torch.cat([torch.bmm(slope, self._b(name)) for name, slope in zip(names, taken, strict=True)], dim=2)
        self._put(into, torch.bmm(thin, self._stacked(names)))
        if inputs is None or narrow is None or not self.trains:
            return
        of_a = torch.bmm(thin.mT, self._taken(inputs)).chunk(len(names), dim=1)
        for name, slope, mine, seen in zip(names, taken, of_a, narrow.chunk(len(names), dim=2), strict=True):
            self._learn(name, mine, torch.bmm(slope.mT, seen))

    def _learn(self, name: str, of_a: Tensor, of_b: Tensor) -> None:
        """Add gradients [n, rank, in] and [n, out, rank] to the adapters that want them."""
        found = [
            (one.gradients[name], mine, its)
            for one, mine, its in zip(self.weights, of_a, of_b, strict=True)
            if one.gradients
        ]
        into = [half for pair, _, _ in found for half in (pair.a, pair.b)]
        torch._foreach_add_(  # pyright: ignore[reportPrivateImportUsage]
            into, [half for _, *both in found for half in both], alpha=self.weights[0].scale
        )

    def _stacked(self, names: Sequence[str]) -> Tensor:
        return torch.stack([one.stacked(names) for one in self.weights])

    def _b(self, name: str) -> Tensor:
        return torch.stack([one.pairs[name].b for one in self.weights])

    def _taken(self, flat: Tensor) -> Tensor:
        """[T, D] -> [n, L, D]."""
        if self.real is None:
            return self._window(flat)
        return flat[self.index]

    def _put(self, flat: Tensor, found: Tensor) -> None:
        """Add s times [n, L, D] to [T, D]."""
        scale = self.weights[0].scale
        if self.real is None:
            self._window(flat).add_(found, alpha=scale)
        else:
            flat.index_add_(0, self.index[self.real], found[self.real], alpha=scale)

    def _window(self, flat: Tensor) -> Tensor:
        start = int(self.index[0, 0])
        return flat[start : start + self.index.numel()].view(*self.index.shape, flat.shape[1])


def crowds(placed: Sequence[Placed], device: torch.device) -> tuple[list[Crowd], list[Placed]]:
    """Adapters that can be computed together, and the others."""
    found: list[Crowd] = []
    alone: list[Placed] = []
    for shape, same in groupby(placed, key=_shape):
        members = list(same)
        if shape is None or len(members) < LEAST:
            alone += members
        else:
            found.append(_crowd(members, device))
    return found, alone


def _shape(placed: Placed) -> tuple[object, ...] | None:
    """What must be the same within a crowd: matrices, scale, and lengths up to a quarter."""
    weights, start, stop = placed
    name = next(iter(weights.pairs), None)
    if stop - start > MOST_POSITIONS or name is None:
        return None
    rounded = next(size for size in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, MOST_POSITIONS) if size >= stop - start)
    return weights.pairs[name].a.shape, tuple(weights.pairs), weights.scale, rounded


def _crowd(members: Sequence[Placed], device: torch.device) -> Crowd:
    starts = torch.tensor([start for _, start, _ in members])
    lengths = torch.tensor([stop - start for _, start, stop in members])
    longest = int(lengths.max())
    steps = torch.arange(longest)
    index = starts[:, None] + torch.minimum(steps, lengths[:, None] - 1)
    side_by_side = torch.equal(index.flatten(), torch.arange(int(starts[0]), int(starts[0]) + index.numel()))
    real = None if side_by_side else (steps < lengths[:, None]).to(device)
    return Crowd(tuple(weights for weights, _, _ in members), index.to(device), real)
