"""Adapters of a decoding step in slots: their matrices side by side in tensors of fixed addresses.

A step multiplies by the matrices of all slots at once and keeps, for each row, the part of its own slot. So the
operators are the same for 1 and 8 adapters and for any order of rows; where as many adapters run as there are slots,
nothing is read that is not needed. On a GPU with Triton two kernels serve all projections of one input
(`adapter_kernel`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tinsmith.engine.lora.adapter import AdapterWeights, LoraPair
from tinsmith.engine.memory_plan import SLOT_BYTES, slot_bytes
from tinsmith.engine.model_parts import HEAD
from tinsmith.engine.triton_support import runs_triton

log = logging.getLogger(__name__)


def most_bytes(device: torch.device) -> int:
    """Most memory of the slots on a device, as its plan says."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return SLOT_BYTES
    return slot_bytes(torch.cuda.get_device_properties(device).total_memory)


class AddProducts(Protocol):
    """Adds s B A x of each row's own slot to the outputs of projections that have one input."""

    def __call__(
        self, inputs: Tensor, outputs: Sequence[Tensor], pairs: Sequence[LoraPair], own: Tensor, scales: Tensor
    ) -> None:
        """inputs [B, in], outputs [B, out] with adjacent columns, and for each the matrices of all slots: a
        [slots * rank, in], b [out, slots * rank]. own is bool [B, slots * rank], scales are float32 [B, 1]."""
        ...


def add_by_operators(
    inputs: Tensor, outputs: Sequence[Tensor], pairs: Sequence[LoraPair], own: Tensor, scales: Tensor
) -> None:
    """`AddProducts` by PyTorch's operators."""
    for output, pair in zip(outputs, pairs, strict=True):
        output.addmm_(_own_columns(inputs @ pair.a.T, own, scales), pair.b.T)


def products_on(device: torch.device, dtype: torch.dtype) -> AddProducts:
    """The kernel where it gives the results of PyTorch's operators, else these."""
    if not runs_triton(device):
        return add_by_operators
    try:
        from tinsmith.engine.sampling.paged import adapter_kernel  # Triton is where GPUs are

        check(adapter_kernel.add_in_place, device, dtype)
    except Exception:
        log.warning("The kernel for adapters does not work here; decoding is slower.", exc_info=True)
        return add_by_operators
    return adapter_kernel.add_in_place


def check(candidate: AddProducts, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError unless the candidate gives the results of PyTorch's operators."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=draw) / shape[-1] ** 0.5).to(device, dtype)

    inputs, widths, slots, rank = drawn(70, 600), (70, 64, 8, 24), 3, 12
    pairs = [LoraPair(drawn(slots * rank, 600), drawn(width, slots * rank)) for width in widths]
    slot = torch.arange(70, device=device) // 25 - 1  # the first rows have no adapter, one slot has no row
    own = slot[:, None] == torch.arange(slots * rank, device=device) // rank
    scales = torch.rand(70, 1, generator=draw).to(device)
    before = [drawn(70, width) for width in widths]
    actual, expected = ([output.clone() for output in before] for _ in range(2))
    candidate(inputs, actual, pairs, own, scales)
    add_by_operators(inputs, expected, pairs, own, scales)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for left, right in zip(actual, expected, strict=True):
        if not torch.allclose(left, right, rtol=tolerance, atol=tolerance):
            raise ValueError("products with adapters in slots differ from PyTorch's")


def _own_columns(narrow: Tensor, own: Tensor, scales: Tensor) -> Tensor:
    """s A x of each row's own slot; 0 elsewhere, whatever another adapter makes of the row."""
    return torch.where(own, narrow, 0.0).mul_(scales)


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The slots as a step's projections read them; an entry of `ActiveAdapters.groups`."""

    stacks: dict[str, LoraPair]
    own: Tensor
    """bool [B, slots * rank]: the columns of each row's slot."""
    scales: Tensor
    """float32 [B, 1]."""
    add_products: AddProducts = add_by_operators

    @property
    def has_gradients(self) -> bool:
        return False

    def has(self, name: str) -> bool:
        """Whether some adapter covers the projection."""
        return name in self.stacks

    def forward(self, inputs: Tensor, outputs: Sequence[Tensor], names: Sequence[str]) -> Tensor:
        """Add s B A x to the outputs [B, out]. Returns the inputs: steps have no backward that needs s A x."""
        pairs = [self.stacks[name] for name in names]
        in_place = all(output.stride(1) == 1 for output in outputs) and inputs.stride(1) == 1
        add_products = self.add_products if in_place else add_by_operators
        add_products(inputs, outputs, pairs, self.own, self.scales)
        return inputs

    def backward(
        self,
        input_grad: Tensor,
        grads: Sequence[Tensor],
        names: Sequence[str],
        inputs: Tensor | None,
        narrow: Tensor | None,
    ) -> None:
        """Steps have no backward."""
        raise NotImplementedError

    def add_to_logits(self, hidden: Tensor, logits: Tensor) -> None:
        """Add the contribution of the output head's adapters, in float32."""
        if HEAD in self.stacks:
            add_by_operators(hidden.float(), [logits], [self.stacks[HEAD]], self.own, self.scales)


class AdapterSlots:
    """The slots, and which adapter is in each."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._add_products = products_on(device, dtype)
        self.limit = most_bytes(device)
        """Most memory of the slots. Versions that need more are served as in a prefill (`linear.ActiveAdapters`)."""
        self.generation = 0
        """Grows when the tensors get other addresses."""
        self._members: list[weakref.ref[AdapterWeights] | None] = []
        self._rank = 0
        self._stacks: dict[str, LoraPair] = {}
        self._scales = torch.zeros(0, device=device)
        self._suitable: weakref.WeakKeyDictionary[AdapterWeights, bool] = weakref.WeakKeyDictionary()

    @property
    def bytes(self) -> int:
        """Memory of the slots."""
        return sum(stack.a.nbytes + stack.b.nbytes for stack in self._stacks.values())

    def place(self, adapters: Sequence[AdapterWeights]) -> list[int] | None:
        """The slots of distinct adapters, which are copied there if necessary; None if they cannot be in slots."""
        if not all(self._is_suitable(adapter) for adapter in adapters):
            return None
        if not self._holds(adapters) and not self._rebuild(adapters):
            return None
        present = [ref() if ref is not None else None for ref in self._members]
        free = [slot for slot, member in enumerate(present) if member not in adapters]
        slots = [present.index(adapter) if adapter in present else free.pop() for adapter in adapters]
        for adapter, slot in zip(adapters, slots, strict=True):
            if present[slot] is not adapter:
                self._write(adapter, slot)
        return slots

    def rows(self, slots: Tensor) -> SlotRows:
        """For rows in these slots, int64 [B]; -1 for rows without an adapter."""
        columns = torch.arange(len(self._members) * self._rank, device=self._device) // self._rank
        own, scales = slots[:, None] == columns, self._scales[slots.clamp(min=0)][:, None]
        return SlotRows(self._stacks, own, scales, self._add_products)

    def release_memory(self) -> None:
        """Drop all adapters."""
        self._members, self._stacks, self._rank = [], {}, 0
        self.generation += 1

    def _is_suitable(self, adapter: AdapterWeights) -> bool:
        """Whether all its matrices are of projections, and finite: in a product with all slots, NaN reaches others."""
        if adapter not in self._suitable:
            matrices = [matrix for pair in adapter.pairs.values() for matrix in (pair.a, pair.b)]
            flat = all(matrix.dim() == 2 for matrix in matrices)
            sums = [matrix.float().sum() for matrix in matrices] if flat else []
            self._suitable[adapter] = flat and (not sums or bool(torch.stack(sums).isfinite().all()))
        return self._suitable[adapter]

    def _holds(self, adapters: Sequence[AdapterWeights]) -> bool:
        return len(adapters) <= len(self._members) and all(
            adapter.pairs.keys() <= self._stacks.keys() and _rank(adapter) <= self._rank for adapter in adapters
        )

    def _rebuild(self, adapters: Sequence[AdapterWeights]) -> bool:
        """Make larger tensors; False if they would be too large."""
        count = 1 << (len(adapters) - 1).bit_length()
        rank = max(self._rank, *map(_rank, adapters))
        shapes = {name: (stack.a.shape[1], stack.b.shape[0]) for name, stack in self._stacks.items()}
        for adapter in adapters:
            shapes |= {name: (pair.a.shape[1], pair.b.shape[0]) for name, pair in adapter.pairs.items()}
        count = max(count, len(self._members))
        columns = count * rank
        if sum(map(sum, shapes.values())) * columns * self._dtype.itemsize > self.limit:
            return False
        self.release_memory()
        self._members.extend([None] * count)
        self._rank = rank
        self._scales = torch.zeros(count, device=self._device)
        for name, (inputs, outputs) in shapes.items():
            dtype = torch.float32 if name == HEAD else self._dtype
            a, b = (
                torch.zeros(*shape, dtype=dtype, device=self._device)
                for shape in ((columns, inputs), (outputs, columns))
            )
            self._stacks[name] = LoraPair(a, b)
        return True

    def _write(self, adapter: AdapterWeights, slot: int) -> None:
        columns = slice(slot * self._rank, (slot + 1) * self._rank)
        places = {name: LoraPair(stack.a[columns], stack.b[:, columns]) for name, stack in self._stacks.items()}
        rank = _rank(adapter)
        unused = [part for name in places.keys() - adapter.pairs.keys() for part in (places[name].a, places[name].b)]
        if rank < self._rank:
            unused += [part for name in adapter.pairs for part in (places[name].a, places[name].b)]
        if unused:
            torch._foreach_zero_(unused)  # pyright: ignore[reportPrivateImportUsage]
        targets = [part for name in adapter.pairs for part in (places[name].a[:rank], places[name].b[:, :rank])]
        matrices = [matrix for pair in adapter.pairs.values() for matrix in (pair.a, pair.b)]
        torch._foreach_copy_(targets, matrices)  # pyright: ignore[reportPrivateImportUsage]
        self._scales[slot] = adapter.scale
        self._members[slot] = weakref.ref(adapter)


def _rank(adapter: AdapterWeights) -> int:
    return max((pair.a.shape[0] for pair in adapter.pairs.values()), default=0)
