"""Many LoRA adapters on one base model, in one pass.

Every projection of the base becomes a LoraLinear; the head stays bare (`head.py` adds its adapter). Which packed
positions belong to which adapter is told to the shared Router before a pass; `products.py` computes with it.

An adapter's matrices stand in one flat float32 tensor (the layout says where), so an optimizer step, a copy and a norm
are one operation each. W' = W + (alpha / rank) B A; A is Kaiming-uniform from the seed, B zero, as PEFT makes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinsmith.engine.base import LoraSpec
from tinsmith.engine.model.packing import Span

HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Pair:
    """A [rank, in] and B [out, rank] of one projection, or their gradients."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each projection's A and B stand in an adapter's flat tensor; the head's come last."""

    spec: LoraSpec
    shapes: tuple[tuple[str, int, int], ...]
    """(module name, in, out), in order."""

    @property
    def scale(self) -> float:
        return self.spec.alpha / self.spec.rank

    @property
    def size(self) -> int:
        return sum(self.spec.rank * (width + height) for _, width, height in self.shapes)

    @property
    def body_size(self) -> int:
        """Elements before the head's."""
        return sum(self.spec.rank * (width + height) for name, width, height in self.shapes if name != HEAD)

    def pairs(self, flat: Tensor) -> dict[str, Pair]:
        """Views of `flat` by module name."""
        return self._cut(flat, self.shapes)

    def halves(self, body: Tensor, head: Tensor) -> dict[str, Pair]:
        """The same of a tensor that was cut in two at `body_size`."""
        last = [shape for shape in self.shapes if shape[0] == HEAD]
        return self._cut(body, self.shapes[: len(self.shapes) - len(last)]) | self._cut(head, last)

    def _cut(self, flat: Tensor, shapes: Sequence[tuple[str, int, int]]) -> dict[str, Pair]:
        """One split for all: hundreds of slices would take milliseconds of each step."""
        rank = self.spec.rank
        pieces = iter(flat.split([rank * length for _, width, height in shapes for length in (width, height)]))
        return {
            name: Pair(next(pieces).view(rank, width), next(pieces).view(height, rank))
            for name, width, height in shapes
        }

    def initial(self) -> Tensor:
        """A fresh adapter, the same for the same seed on every machine: float32 [size] on the CPU."""
        generator = torch.Generator("cpu").manual_seed(self.spec.seed & (2**63 - 1))
        flat = torch.zeros(self.size, device="cpu")
        for pair in self.pairs(flat).values():
            bound = 1 / math.sqrt(pair.a.shape[1])
            pair.a.uniform_(-bound, bound, generator=generator)
        return flat


@dataclass(slots=True, weakref_slot=True, eq=False)
class Weights:
    """An adapter as a pass reads it: pairs in the base's dtype (the head's in float32), and where gradients go."""

    scale: float
    pairs: dict[str, Pair]
    gradients: dict[str, Pair] = field(default_factory=dict)
    """float32; empty when none are wanted."""
    stacks: dict[str, Tensor] = field(default_factory=dict)
    """A matrices side by side, by the first one's name; made when first asked for."""

    def stacked(self, names: Sequence[str]) -> Tensor:
        """The A matrices of projections that share their input: [n rank, in]."""
        if len(names) == 1:
            return self.pairs[names[0]].a
        if names[0] not in self.stacks:
            self.stacks[names[0]] = torch.cat([self.pairs[name].a for name in names])
        return self.stacks[names[0]]


def weights_of(layout: Layout, master: Tensor, dtype: torch.dtype) -> Weights:
    """A reading of `master` (float32 [size]) of this moment: rounded copies, so that later steps don't show.

    In float32 it is the master itself, which must stay as it is while the reading is in use.
    """
    if dtype == torch.float32:
        return Weights(layout.scale, layout.pairs(master))
    body, head = master[: layout.body_size].to(dtype, copy=True), master[layout.body_size :].clone()
    return Weights(layout.scale, layout.halves(body, head))


Placed = tuple[Weights, int, int]
"""An adapter and the packed positions start..stop that it serves."""


def place(spans: Sequence[Span], adapters: Sequence[Weights | None]) -> list[Placed]:
    """Spans with their adapters; those of the bare base model need no one."""
    found = [(adapters[span.adapter], span.start, span.stop) for span in spans]
    return [(weights, start, stop) for weights, start, stop in found if weights is not None]
