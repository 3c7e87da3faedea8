"""Adapters of many tenants as grouped products, on GPUs whose grouped product of bfloat16 is one kernel.

The positions of a pass are put in the order of their adapters. One product then multiplies each adapter's rows with its
own matrix, whatever the number of adapters and the lengths of their rows: launches are the same for 1 and 64 tenants,
nothing is padded but ranks, and the host never waits for the device.

The matrices of all adapters are stacked by site when a projection first needs them, and serve all later passes of the
same adapters; stacks beyond STACK_BYTES in all groups are made again in each call. The stacks are copies: what they are
made of, bfloat16 copies of the weights, never changes (`adapter.adapter_weights`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tinsmith.engine.lora.adapter import AdapterWeights, LoraPair, PlacedAdapter
from tinsmith.engine.memory_plan import STACK_BYTES
from tinsmith.engine.model_parts import HEAD

ALIGNMENT = 8
"""Elements of bfloat16 in the 16 bytes that the kernel loads at once: widths and ranks are multiples of it."""

MIN_GROUPED_ADAPTERS = 2
"""A single adapter needs no stack."""

Ranges = tuple[tuple[tuple[int, int], ...], ...]
"""The ranges start..stop of packed positions of each adapter."""


def has_grouped_products(weights: Tensor) -> bool:
    """Whether a grouped product with weights like these is one kernel; elsewhere PyTorch loops over the groups."""
    return weights.dtype == torch.bfloat16 and on_device_with_grouped_products(weights.device)


def on_device_with_grouped_products(device: torch.device) -> bool:
    """Whether grouped products of bfloat16 are one kernel on a device."""
    if device.type != "cuda" or "grouped_mm" not in vars(functional):
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)


@dataclass(slots=True)
class Stacks:
    """Matrices of the same adapters by site, and where the adapters are in a pass."""

    members: tuple[weakref.ref[Tensor], ...]
    """A matrix of each adapter, which tells them apart."""
    matrices: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    bytes: int = 0
    limit: int = STACK_BYTES
    ranges: Ranges = ()
    """Positions of each adapter, of which `on_device` is."""
    on_device: GroupPositions | None = None

    def serve(self, weights: Sequence[AdapterWeights]) -> bool:
        """Whether these adapters' matrices are stacked here."""
        same_number = len(weights) == len(self.members)
        return same_number and all(ref() is _first(each).a for ref, each in zip(self.members, weights, strict=True))

    def get(self, key: tuple[str, ...], stack: Callable[[], Tensor]) -> Tensor:
        if key in self.matrices:
            return self.matrices[key]
        stacked = stack()
        if self.bytes + stacked.nbytes <= self.limit:
            self.bytes += stacked.nbytes
            self.matrices[key] = stacked
        return stacked

    def keep_within(self, limit: int) -> None:
        """Keep stacks of at most so many bytes from now on."""
        self.limit = limit
        if self.bytes > limit:
            self.matrices, self.bytes = {}, 0


@dataclass(frozen=True, slots=True)
class GroupPositions:
    """The positions of a group of n adapters in a pass, on the device."""

    ends: Tensor
    """int32 [n]: the end of each adapter's P positions, in their order."""
    rows: slice | Tensor
    """The packed positions in the order of the adapters: all of a range, or int64 [P]."""
    scales: Tensor | float
    """float32 [P, 1], or the scale of all adapters."""


@dataclass(frozen=True, slots=True)
class GroupedAdapters:
    """n adapters of one rank and the same modules with any numbers of positions, computed as grouped products."""

    weights: tuple[AdapterWeights, ...]
    stacks: Stacks
    positions: GroupPositions

    @property
    def has_gradients(self) -> bool:
        return any(weights.gradients for weights in self.weights)

    def has(self, name: str) -> bool:
        """Whether the adapters cover the projection."""
        return name in self.weights[0].pairs

    def forward(self, inputs: Tensor, outputs: Sequence[Tensor], names: Sequence[str]) -> Tensor:
        """Add s B A x to the outputs [T, out]; returns s A x of all projections [P, projections * padded rank]."""
        narrow = self._product(self._rows(inputs), self._stacked_a(names).mT).mul_(self.positions.scales)
        for name, output, piece in zip(names, outputs, narrow.chunk(len(names), dim=1), strict=True):
            self._add(output, self._product(piece, self._stacked_b(name).mT))
        return narrow

    def backward(
        self,
        input_grad: Tensor,
        grads: Sequence[Tensor],
        names: Sequence[str],
        inputs: Tensor | None,
        narrow: Tensor | None,
    ) -> None:
        """Add to the gradient of the inputs and, if `inputs` and `narrow` are given, to the adapters' gradients."""
        rows = [self._rows(grad) for grad in grads]
        pieces = [self._product(grad, self._stacked_b(name)) for name, grad in zip(names, rows, strict=True)]
        narrow_grad = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).mul_(self.positions.scales)
        self._add(input_grad, self._product(narrow_grad, self._stacked_a(names)))
        if inputs is None or narrow is None or not self.has_gradients:
            return
        a_grads = self._product(narrow_grad.T, self._rows(inputs)).chunk(len(names), dim=1)
        for name, grad, a_grad, piece in zip(names, rows, a_grads, narrow.chunk(len(names), dim=1), strict=True):
            self._accumulate(name, a_grad, self._product(grad.T, piece))

    def _accumulate(self, name: str, a_grads: Tensor, b_grads: Tensor) -> None:
        """Add gradients [n, padded rank, in] and [n, out, padded rank] to the adapters that have gradient buffers."""
        rank = self.weights[0].pairs[name].a.shape[0]
        a_exact, b_exact = a_grads[:, :rank].float().contiguous(), b_grads[:, :, :rank].float().contiguous()
        buffers, grads = [], []
        for weights, a_grad, b_grad in zip(self.weights, a_exact.unbind(), b_exact.unbind(), strict=True):
            if weights.gradients:
                buffers += [weights.gradients[name].a, weights.gradients[name].b]
                grads += [a_grad, b_grad]
        torch._foreach_add_(buffers, grads)  # pyright: ignore[reportPrivateImportUsage]

    def _stacked_a(self, names: Sequence[str]) -> Tensor:
        """[n, projections * padded rank, in]."""

        def stack() -> Tensor:
            stacked = torch.stack([weights.pairs[name].a for weights in self.weights for name in names])
            padded = functional.pad(stacked, (0, 0, 0, -stacked.shape[1] % ALIGNMENT))
            return padded.view(len(self.weights), -1, stacked.shape[2])

        return self.stacks.get(("a", *names), stack)

    def _stacked_b(self, name: str) -> Tensor:
        """[n, out, padded rank]."""

        def stack() -> Tensor:
            stacked = torch.stack([weights.pairs[name].b for weights in self.weights])
            return functional.pad(stacked, (0, -stacked.shape[2] % ALIGNMENT))

        return self.stacks.get(("b", name), stack)

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        return functional.grouped_mm(left, right, offs=self.positions.ends)

    def _rows(self, flat: Tensor) -> Tensor:
        """The adapters' rows of [T, D] in their order: [P, D]."""
        rows = self.positions.rows
        if isinstance(rows, Tensor):
            return flat.index_select(0, rows)
        part = flat[rows]
        is_aligned = part.stride(1) == 1 and not part.stride(0) % ALIGNMENT and not part.storage_offset() % ALIGNMENT
        return part if is_aligned else part.contiguous()

    def _add(self, flat: Tensor, values: Tensor) -> None:
        """Add `values` [P, D] to `flat` [T, D]."""
        rows = self.positions.rows
        if isinstance(rows, Tensor):
            flat.index_add_(0, rows, values)
        else:
            flat[rows].add_(values)


def group_adapters(
    placed: Sequence[PlacedAdapter], previous: Sequence[Stacks]
) -> tuple[list[GroupedAdapters], list[PlacedAdapter]]:
    """Groups of adapters with one rank and the same modules, and those that are in no group, in order.

    `previous` are the stacks of earlier passes, which serve the same adapters again.
    """
    classes: dict[tuple[object, ...], list[PlacedAdapter]] = {}
    groups, others = list[GroupedAdapters](), list[PlacedAdapter]()
    for entry in placed:
        pairs = entry[0].pairs
        if pairs and has_grouped_products(_first(entry[0]).a):
            classes.setdefault((_first(entry[0]).a.shape[-2], *pairs), []).append(entry)
        else:
            others.append(entry)
    for members in classes.values():
        by_adapter: dict[AdapterWeights, list[tuple[int, int]]] = {}
        for weights, start, stop in members:
            by_adapter.setdefault(weights, []).append((start, stop))
        if len(by_adapter) < MIN_GROUPED_ADAPTERS or not _is_aligned(members[0][0]):
            others += members
            continue
        adapters = tuple(by_adapter)
        stacks = next((each for each in previous if each.serve(adapters)), None)
        stacks = stacks or Stacks(tuple(weakref.ref(_first(weights).a) for weights in adapters))
        groups.append(GroupedAdapters(adapters, stacks, _positions(stacks, by_adapter)))
    for group in groups:
        group.stacks.keep_within(STACK_BYTES // len(groups))
    return groups, sorted(others, key=lambda entry: entry[1])


def _is_aligned(weights: AdapterWeights) -> bool:
    widths = [(pair.a.shape[-1], pair.b.shape[-2]) for name, pair in weights.pairs.items() if name != HEAD]
    return not any(width % ALIGNMENT for pair in widths for width in pair)


def _first(weights: AdapterWeights) -> LoraPair:
    return next(iter(weights.pairs.values()))


def _positions(stacks: Stacks, by_adapter: dict[AdapterWeights, list[tuple[int, int]]]) -> GroupPositions:
    """Where the adapters are; what was copied to the device for the same ranges serves again."""
    ranges = tuple(tuple(each) for each in by_adapter.values())
    if stacks.on_device is None or stacks.ranges != ranges:
        adapters = list(by_adapter)
        stacks.ranges, stacks.on_device = ranges, _copied(adapters, ranges, _first(adapters[0]).a.device)
    return stacks.on_device


def _copied(weights: Sequence[AdapterWeights], ranges: Ranges, device: torch.device) -> GroupPositions:
    lengths = [sum(stop - start for start, stop in each) for each in ranges]
    rows = np.concatenate([np.arange(start, stop) for each in ranges for start, stop in each])
    ends = torch.from_numpy(np.cumsum(lengths, dtype=np.int32)).to(device)
    first, last = int(rows[0]), int(rows[-1])
    is_range = np.array_equal(rows, np.arange(first, last + 1))
    row_scales = np.repeat(np.array([each.scale for each in weights], np.float32), lengths)[:, None]
    return GroupPositions(
        ends,
        slice(first, last + 1) if is_range else torch.from_numpy(rows).to(device),
        weights[0].scale if (row_scales == row_scales[0]).all() else torch.from_numpy(row_scales).to(device),
    )
