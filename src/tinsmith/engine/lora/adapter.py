"""LoRA adapters as flat tensors: W' = W + (alpha / rank) B A.

An adapter's matrices are views of one flat float32 tensor, at the offsets of its layout, so an optimizer step, a copy
or a norm is one operation. A is initialized Kaiming-uniform from the seed and B with zeros, as PEFT does.

An adapter has a pair A, B at each of its sites: a projection, a slice of a projection's rows, or one projection of all
experts of a layer. Experts share the factor on the side of the residual stream, and each has its own other factor.

An imported adapter may have a lower rank at some sites, or none, and another scale. All pairs have the adapter's rank
here: the rest of A's rows and B's columns is zero, gets a gradient of zero and stays zero. Passes read B times the
site's factor, and the gradient of that B times the factor is B's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from tinsmith.engine.base import LoraSpec
from tinsmith.engine.model.packing import AdapterSpan
from tinsmith.engine.model_parts import HEAD


@dataclass(frozen=True, slots=True)
class AdapterSite:
    """Where an adapter has a pair of matrices: a projection or some of its rows, or a projection of every expert."""

    name: str
    inputs: int
    outputs: int
    experts: int = 0
    """Number of experts; 0 for a projection outside of a mixture of experts."""
    shared: Literal["", "a", "b"] = ""
    """The matrix that all experts share."""
    rank: int | None = None
    """Its own rank, if lower than the adapter's; 0 for no adapter at this site."""
    factor: float = 1.0
    """Its scale in units of the adapter's alpha / rank."""

    @property
    def parameters_per_rank(self) -> int:
        a_stack, b_stack = self._stacks
        return max(a_stack, 1) * self.inputs + max(b_stack, 1) * self.outputs

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and B: [rank, in] and [out, rank], for experts with a leading dimension E, or 1 if shared."""
        a_shape, b_shape = (rank, self.inputs), (self.outputs, rank)
        if not self.experts:
            return a_shape, b_shape
        a_stack, b_stack = self._stacks
        return (a_stack, *a_shape), (b_stack, *b_shape)

    @property
    def _stacks(self) -> tuple[int, int]:
        return (1 if self.shared == "a" else self.experts), (1 if self.shared == "b" else self.experts)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """A and B of one site, in the shapes of `AdapterSite.shapes`, or their gradients."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Offsets of each site's A and B in an adapter's flat tensor; the head's are last."""

    spec: LoraSpec
    sites: tuple[AdapterSite, ...]

    @property
    def scale(self) -> float:
        return self.spec.alpha / self.spec.rank

    @property
    def is_uniform(self) -> bool:
        """Whether all sites have the adapter's rank."""
        return all(site.rank is None for site in self.sites)

    @property
    def factors(self) -> dict[str, float]:
        """Factors other than 1 by site name."""
        return {site.name: site.factor for site in self.sites if site.factor != 1}

    @property
    def parameters(self) -> int:
        """Elements of the flat tensor that can be other than zero."""
        return sum(self.rank_of(site) * site.parameters_per_rank for site in self.sites)

    def rank_of(self, site: AdapterSite) -> int:
        """A site's own rank."""
        return self.spec.rank if site.rank is None else site.rank

    def alpha_of(self, site: AdapterSite) -> float:
        """The alpha that gives a site's scale with its own rank."""
        if site.rank is None and site.factor == 1:
            return self.spec.alpha
        return site.factor * self.scale * self.rank_of(site)

    def fit(self, ranks: Mapping[str, int], factors: Mapping[str, float]) -> AdapterLayout:
        """The layout with the ranks of sites, 0 where none is given, and factors other than 1."""
        sites = (
            replace(
                site,
                rank=None if ranks.get(site.name) == self.spec.rank else ranks.get(site.name, 0),
                factor=factors.get(site.name, 1.0),
            )
            for site in self.sites
        )
        return AdapterLayout(self.spec, tuple(sites))

    @property
    def size(self) -> int:
        """Elements of the flat tensor."""
        return self.spec.rank * sum(site.parameters_per_rank for site in self.sites)

    @property
    def body_size(self) -> int:
        """Elements without the head's."""
        return self.spec.rank * sum(site.parameters_per_rank for site in self.sites if site.name != HEAD)

    def pairs(self, flat: Tensor) -> dict[str, LoraPair]:
        """Views of `flat` by site name."""
        return self._split(flat, self.sites)

    def own_pairs(self, flat: Tensor) -> dict[str, LoraPair]:
        """Views by name of the sites that the adapter has, each of its own rank."""
        if self.is_uniform:
            return self.pairs(flat)
        pairs = self.pairs(flat)
        ranks = {site.name: rank for site in self.sites if (rank := self.rank_of(site))}
        return {name: LoraPair(pairs[name].a[..., :rank, :], pairs[name].b[..., :rank]) for name, rank in ranks.items()}

    def pairs_of_parts(self, body: Tensor, head: Tensor) -> dict[str, LoraPair]:
        """Views by site name of a flat tensor that was split at `body_size`."""
        last = [site for site in self.sites if site.name == HEAD]
        return self._split(body, self.sites[: len(self.sites) - len(last)]) | self._split(head, last)

    def _split(self, flat: Tensor, sites: Sequence[AdapterSite]) -> dict[str, LoraPair]:
        """One split for all sites, because hundreds of slices would take milliseconds of each step."""
        shapes = [shape for site in sites for shape in site.shapes(self.spec.rank)]
        pieces = flat.split([math.prod(shape) for shape in shapes])
        views = iter([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])
        return {site.name: LoraPair(next(views), next(views)) for site in sites}

    def with_one_scale(self, flat: Tensor) -> tuple[AdapterLayout, Tensor]:
        """The same adapter without factors, for readers that apply alpha / rank to all sites: B holds them."""
        factors = self.factors
        if not factors:
            return self, flat
        flat = flat.clone()
        pairs = self.pairs(flat)
        for name, factor in factors.items():
            pairs[name].b.mul_(factor)
        return AdapterLayout(self.spec, tuple(replace(site, factor=1.0) for site in self.sites)), flat

    def initial(self) -> Tensor:
        """A new adapter, float32 [size] on the CPU; the same for the same seed on every machine."""
        generator = torch.Generator("cpu").manual_seed(self.spec.seed & (2**63 - 1))
        flat = torch.zeros(self.size, device="cpu")
        for pair in self.pairs(flat).values():
            bound = 1 / math.sqrt(pair.a.shape[-1])
            pair.a.uniform_(-bound, bound, generator=generator)
        return flat


@dataclass(frozen=True, slots=True)
class AdapterPanels:
    """Matrices of projections that share their input as compiled functions read them (`compiled_projections`)."""

    tensors: tuple[Tensor, ...]
    """A of all projections in panels, and B of each."""
    addresses: tuple[int, ...]
    """What the functions get of them."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class AdapterWeights:
    """An adapter as a pass reads it: pairs in the base's dtype (the head's in float32), and its gradient buffers."""

    scale: float
    pairs: dict[str, LoraPair]
    gradients: dict[str, LoraPair] = field(default_factory=dict)
    """float32; empty if the adapter is not trained."""
    stacked_cache: dict[str, Tensor] = field(default_factory=dict)
    """Results of `stacked_a` by the first module name."""
    panels: dict[str, AdapterPanels] = field(default_factory=dict)
    """Of projections that share their input by the first module name, if the adapter is not trained."""

    def stacked_a(self, names: Sequence[str]) -> Tensor:
        """The A matrices of projections that share their input: [projections * rank, in]."""
        if len(names) == 1:
            return self.pairs[names[0]].a
        if names[0] not in self.stacked_cache:
            self.stacked_cache[names[0]] = torch.cat([self.pairs[name].a for name in names])
        return self.stacked_cache[names[0]]


def adapter_weights(layout: AdapterLayout, master: Tensor, dtype: torch.dtype) -> AdapterWeights:
    """The weights of `master` (float32 [size]) in `dtype`, as copies that later steps do not change.

    In float32 they are views of `master`, which must not change while they are in use, unless sites have factors.
    """
    layout, master = layout.with_one_scale(master)
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


def adapter_spans(weights: Sequence[AdapterWeights | None]) -> list[PlacedAdapter]:
    """The spans of a batch, one position per entry, that use the same adapter."""
    spans, start = [], 0
    for _, same in groupby(weights, key=id):
        members = list(same)
        if members[0] is not None:
            spans.append((members[0], start, start + len(members)))
        start += len(members)
    return spans
