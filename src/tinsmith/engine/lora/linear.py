"""A frozen projection plus what adapters add to it, forward and backward by hand; for several that share one input too.

Gradients are taken for adapters alone: the backward adds them straight into the adapter's gradient buffer and passes
on the input's gradient; no weight gradient of the base is ever formed. Projections that read one input (q, k and v;
gate and up) have their A matrices side by side, so that what is narrow is one product and not three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tinsmith.engine.base import LoraSpec
from tinsmith.engine.lora.adapter import HEAD, Layout, Placed
from tinsmith.engine.lora.matmul import Fixed
from tinsmith.engine.model.loading import BaseModel
from tinsmith.engine.model.support import PROJECTIONS

if TYPE_CHECKING:
    from tinsmith.engine.lora.adapter import Placed, Weights


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


class Router:
    """Tells the projections which adapter serves which packed positions of the pass at hand."""

    def __init__(self) -> None:
        self.parts: Parts = ()

    @contextmanager
    def using(self, placed: Sequence[Placed]) -> Iterator[None]:
        """For the passes made inside."""
        self.parts = parts_of(placed)
        try:
            yield
        finally:
            self.parts = ()


class LoraLinear(nn.Module):
    """A frozen projection plus what the router's adapters add to it."""

    def __init__(self, base: nn.Linear, name: str, router: Router) -> None:
        super().__init__()
        bias = None if base.bias is None else base.bias.detach()
        self.product, self.name, self.router = Fixed(base.weight.detach(), bias), name, router

    def forward(self, inputs: Tensor) -> Tensor:
        return project(inputs.squeeze(0), [self.projection], self.router.parts)[0][None]

    @property
    def projection(self) -> Projection:
        """What `products` takes."""
        return Projection(self.name, self.product)


def adapt(base: BaseModel) -> Router:
    """Put LoraLinear in place of every projection of the base; returns what steers them."""
    router = Router()
    wanted = {name for names in PROJECTIONS.values() for name in names}
    for path, module in list(base.model.named_modules()):
        parent, _, leaf = path.rpartition(".")
        if leaf in wanted and isinstance(module, nn.Linear):
            setattr(base.model.get_submodule(parent), leaf, LoraLinear(module, path, router))
    return router


def layout_for(base: BaseModel, spec: LoraSpec) -> Layout:
    """The layout of an adapter on an adapted base, for the parts that the spec trains."""
    leaves = (*(PROJECTIONS["attn"] if spec.train_attn else ()), *(PROJECTIONS["mlp"] if spec.train_mlp else ()))
    shapes = [
        (module.name, module.product.shape[1], module.product.shape[0])
        for module in base.model.modules()
        if isinstance(module, LoraLinear) and module.name.rpartition(".")[2] in leaves
    ]
    if spec.train_unembed:
        shapes.append((HEAD, base.head.shape[1], base.head.shape[0]))
    return Layout(spec, tuple(shapes))
