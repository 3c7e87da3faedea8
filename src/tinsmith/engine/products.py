"""A frozen projection plus what adapters add to it, forward and backward by hand; for several that share one input too.

Gradients are taken for adapters alone: the backward adds them straight into the adapter's gradient buffer and passes
on the input's gradient; no weight gradient of the base is ever formed. Projections that read one input (q, k and v;
gate and up) have their A matrices side by side, so that what is narrow is one product and not three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tinsmith.engine.crowd import Crowd, crowds
from tinsmith.engine.fixed import Fixed

if TYPE_CHECKING:
    from tinsmith.engine.lora import Placed, Weights


@dataclass(frozen=True, slots=True)
class Projection:
    """A projection of the base: its name, and its product."""

    name: str
    product: Fixed


@dataclass(frozen=True, slots=True)
class Part:
    """One adapter's part of a pass: the packed positions start..stop."""

    weights: Weights
    start: int
    stop: int

    @property
    def trains(self) -> bool:
        return bool(self.weights.gradients)

    def has(self, name: str) -> bool:
        return name in self.weights.pairs

    def add(self, inputs: Tensor, outputs: Sequence[Tensor], names: Sequence[str]) -> Tensor:
        """Add s B A x to the outputs; returns A x of all projections side by side [positions, n rank]."""
        narrow = linear(self._mine(inputs), self.weights.stacked(names))
        pieces = narrow.chunk(len(names), dim=1) if len(names) > 1 else (narrow,)
        for name, output, piece in zip(names, outputs, pieces, strict=True):
            self._mine(output).addmm_(piece, self.weights.pairs[name].b.T, alpha=self.weights.scale)
        return narrow

    def _mine(self, rows: Tensor) -> Tensor:
        """The adapter's of all rows; no view where it has them all, for a step of few rows makes thousands of views."""
        return rows if self.stop - self.start == len(rows) else rows[self.start : self.stop]

    def add_back(
        self, into: Tensor, slopes: Sequence[Tensor], names: Sequence[str], inputs: Tensor | None, narrow: Tensor | None
    ) -> None:
        """Add to the gradient of the inputs; and, where inputs and narrow are given, to the adapter's own."""
        weights, rows = self.weights, slice(self.start, self.stop)
        pieces = [slope[rows] @ weights.pairs[name].b for name, slope in zip(names, slopes, strict=True)]
        thin = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        into[rows].addmm_(thin, weights.stacked(names), alpha=weights.scale)
        if inputs is None or narrow is None or not self.trains:
            return
        of_a = (thin.T @ inputs[rows]).chunk(len(names), dim=0)
        for name, slope, mine, seen in zip(names, slopes, of_a, narrow.chunk(len(names), dim=1), strict=True):
            gradient = weights.gradients[name]
            gradient.a.add_(mine, alpha=weights.scale)
            gradient.b.add_(slope[rows].T @ seen, alpha=weights.scale)


Parts = Sequence[Part | Crowd]


def parts_of(placed: Sequence[Placed]) -> list[Part | Crowd]:
    """How the adapters of a pass are computed: together where they are many and small, else one by one."""
    if not placed:
        return []
    device = next(iter(placed[0][0].pairs.values())).a.device
    together, alone = crowds(placed, device)
    return [*together, *(Part(weights, start, stop) for weights, start, stop in alone)]


def project(inputs: Tensor, shared: Sequence[Projection], parts: Parts) -> tuple[Tensor, ...]:
    """inputs [T, in] -> [T, out] of each projection, with the adapters that have these projections."""
    mine = [part for part in parts if part.has(shared[0].name)]
    if torch.is_grad_enabled() and inputs.requires_grad:
        return _Products.apply(inputs, shared, mine)  # type: ignore[no-any-return]
    return tuple(_forward(inputs, shared, mine)[0])


def _forward(inputs: Tensor, shared: Sequence[Projection], parts: Parts) -> tuple[list[Tensor], list[Tensor]]:
    outputs = [one.product(inputs) for one in shared]
    names = [one.name for one in shared]
    return outputs, [part.add(inputs, outputs, names) for part in parts]


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, shared: Sequence[Projection], parts: Parts) -> tuple[Tensor, ...]:
        outputs, narrow = _forward(inputs, shared, parts)
        trained = any(part.trains for part in parts)
        ctx.save_for_backward(*((inputs, *narrow) if trained else ()))
        ctx.shared, ctx.parts = shared, parts
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        names = [one.name for one in ctx.shared]
        result = ctx.shared[0].product.back(grads[0])
        for slope, one in zip(grads[1:], ctx.shared[1:], strict=True):
            result = one.product.back(slope, onto=result)
        saved = ctx.saved_tensors
        for number, part in enumerate(ctx.parts):
            inputs, narrow = (saved[0], saved[1 + number]) if saved else (None, None)
            part.add_back(result, grads, names, inputs, narrow)
        return result, None, None
