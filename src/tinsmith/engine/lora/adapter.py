"""LoRA adapters as flat tensors: W' = W + (alpha / rank) B A.

An adapter's matrices are views of one flat float32 tensor, at the offsets of its layout, so an optimizer step, a copy
or a norm is one operation. A is initialized Kaiming-uniform from the seed and B with zeros, as PEFT does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinsmith.engine.base import LoraSpec
from tinsmith.engine.model.packing import AdapterSpan

HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class LoraPair:
    """A [rank, in] and B [out, rank] of one projection, or their gradients."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Offsets of each projection's A and B in an adapter's flat tensor; the head's are last."""

    spec: LoraSpec
    shapes: tuple[tuple[str, int, int], ...]
    """(module name, in, out), in order."""

    @property
    def scale(self) -> float:
        return self.spec.alpha / self.spec.rank

    @property
    def size(self) -> int:
        """Elements of the flat tensor."""
        return sum(self.spec.rank * (width + height) for _, width, height in self.shapes)

    @property
    def body_size(self) -> int:
        """Elements without the head's."""
        return sum(self.spec.rank * (width + height) for name, width, height in self.shapes if name != HEAD)

    def pairs(self, flat: Tensor) -> dict[str, LoraPair]:
        """Views of `flat` by module name."""
        return self._split(flat, self.shapes)

    def pairs_of_parts(self, body: Tensor, head: Tensor) -> dict[str, LoraPair]:
        """Views by module name of a flat tensor that was split at `body_size`."""
        last = [shape for shape in self.shapes if shape[0] == HEAD]
        return self._split(body, self.shapes[: len(self.shapes) - len(last)]) | self._split(head, last)

    def _split(self, flat: Tensor, shapes: Sequence[tuple[str, int, int]]) -> dict[str, LoraPair]:
        """One split for all modules, because hundreds of slices would take milliseconds of each step."""
        rank = self.spec.rank
        pieces = iter(flat.split([rank * length for _, width, height in shapes for length in (width, height)]))
        return {
            name: LoraPair(next(pieces).view(rank, width), next(pieces).view(height, rank))
            for name, width, height in shapes
        }

    def initial(self) -> Tensor:
        """A new adapter, float32 [size] on the CPU; the same for the same seed on every machine."""
        generator = torch.Generator("cpu").manual_seed(self.spec.seed & (2**63 - 1))
        flat = torch.zeros(self.size, device="cpu")
        for pair in self.pairs(flat).values():
            bound = 1 / math.sqrt(pair.a.shape[1])
            pair.a.uniform_(-bound, bound, generator=generator)
        return flat


@dataclass(slots=True, weakref_slot=True, eq=False)
class AdapterWeights:
    """An adapter as a pass reads it: pairs in the base's dtype (the head's in float32), and its gradient buffers."""

    scale: float
    pairs: dict[str, LoraPair]
    gradients: dict[str, LoraPair] = field(default_factory=dict)
    """float32; empty if the adapter is not trained."""
    stacked_cache: dict[str, Tensor] = field(default_factory=dict)
    """Results of `stacked_a` by the first module name."""

    def stacked_a(self, names: Sequence[str]) -> Tensor:
        """The A matrices of projections that share their input: [projections * rank, in]."""
        if len(names) == 1:
            return self.pairs[names[0]].a
        if names[0] not in self.stacked_cache:
            self.stacked_cache[names[0]] = torch.cat([self.pairs[name].a for name in names])
        return self.stacked_cache[names[0]]


def adapter_weights(layout: AdapterLayout, master: Tensor, dtype: torch.dtype) -> AdapterWeights:
    """The weights of `master` (float32 [size]) in `dtype`, as copies that later steps do not change.

    In float32 they are views of `master`, which must not change while they are in use.
    """
    if dtype == torch.float32:
        return AdapterWeights(layout.scale, layout.pairs(master))
    body, head = master[: layout.body_size].to(dtype, copy=True), master[layout.body_size :].clone()
    return AdapterWeights(layout.scale, layout.pairs_of_parts(body, head))


PlacedAdapter = tuple[AdapterWeights, int, int]
"""An adapter and the packed positions start..stop that it serves."""


def place_adapters(spans: Sequence[AdapterSpan], adapters: Sequence[AdapterWeights | None]) -> list[PlacedAdapter]:
    """The adapter of each span; spans of the bare base model (None) are left out."""
    placed = [(adapters[span.adapter], span.start, span.stop) for span in spans]
    return [(weights, start, stop) for weights, start, stop in placed if weights is not None]
