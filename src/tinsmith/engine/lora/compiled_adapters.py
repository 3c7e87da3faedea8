"""Adapters on a CPU, computed by `cpu.adapters` in place of PyTorch's products.

Those take 1.2 to 1.4 times as long for hundreds of positions, because one side of each is only as long as the rank, and
three times as long for few, because every product is a call of its own (benchmarks/NOTES.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.cpu import openmp
from tinsmith.engine.cpu.instructions import has_pair_products
from tinsmith.engine.lora.adapter import AdapterWeights, LoraPair, PlacedAdapter
from tinsmith.engine.lora.adapter_groups import AdapterGroup, AdapterSlice

log = logging.getLogger(__name__)

MULTIPLE_RANK, MULTIPLE_WIDTH = 8, 32
"""What ranks and widths must be multiples of."""
ITEM = torch.bfloat16.itemsize
LINES = {"inputs": "input_line", "input_grads": "input_grad_line"}
"""Fields of `cpu.adapters.ADAPTER` with numbers from one row to the next."""
CHECK_POSITIONS = 77
TOLERANCE = 3e-2
"""Error of results in the check, by the largest of them: bfloat16 rounds to 1/256 of a number, and more than once."""


class CompiledAdapters:
    """Adapters of the same modules in bfloat16, each at its packed positions."""

    def __init__(self, placed: Sequence[PlacedAdapter]) -> None:
        self._placed = tuple(placed)
        self._tables = dict[tuple[str, ...], _Tables]()

    @property
    def has_gradients(self) -> bool:
        return any(weights.gradients for weights, _, _ in self._placed)

    def has(self, name: str) -> bool:
        """Whether the adapters cover the projection."""
        return name in self._placed[0][0].pairs

    def forward(self, inputs: Tensor, outputs: Sequence[Tensor], names: Sequence[str]) -> Tensor:
        """Add s B A x to the outputs; returns what the backward needs of A x, as `cpu.adapters` lays it out."""
        from tinsmith.engine.cpu import adapters

        tables = self._tables_of(names)
        narrow = inputs.new_empty(tables.narrow_size if self.has_gradients else 0)
        tables.call(adapters.forward_function, outputs, inputs=_rows_of(inputs), narrow=narrow)
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
        from tinsmith.engine.cpu import adapters

        tables, grads = self._tables_of(names), [_rows_of(grad) for grad in grads]
        if inputs is None or narrow is None or not self.has_gradients:
            tables.call(adapters.backward_function, grads, input_grads=input_grad)
            return
        narrow_grads = input_grad.new_empty(tables.narrow_size)
        tables.call(adapters.backward_function, grads, input_grads=input_grad, narrow_grads=narrow_grads)
        tables.call(
            adapters.gradient_function, grads, inputs=_rows_of(inputs), narrow=narrow, narrow_grads=narrow_grads
        )

    def narrow_of(self, inputs: Tensor, names: Sequence[str]) -> Tensor:
        """What `forward` returns, without outputs."""
        pieces = []
        for weights, start, stop in self._placed:
            rank, rows = weights.pairs[names[0]].a.shape[0], stop - start
            padded = inputs.new_zeros(rows + rows % 2, _line(rank, len(names)))
            for number, name in enumerate(names):
                piece = padded[:rows, number * _slot(rank) :]
                piece[:, :rank] = inputs[start:stop] @ weights.pairs[name].a.T
            pieces.append(padded.unflatten(0, (-1, 2)).transpose(1, 2).flatten())
        return torch.cat(pieces)

    def _tables_of(self, names: Sequence[str]) -> _Tables:
        key = tuple(names)
        if key not in self._tables:
            self._tables[key] = _Tables.of(self._placed, key)
        return self._tables[key]


@dataclass(frozen=True, slots=True)
class _Tables:
    """What of the calls for some projections is the same in each."""

    adapters: np.ndarray
    """`cpu.adapters.ADAPTER` [n]."""
    sites: np.ndarray
    """`cpu.adapters.SITE` [n, projections]."""
    starts: np.ndarray
    """int64 [n]: the first position of each adapter."""
    offsets: np.ndarray
    """int64 [n]: where each one's part of narrow begins."""
    narrow_size: int
    blocks: int
    """Blocks of rows, which the threads divide among them."""

    @classmethod
    def of(cls, placed: Sequence[PlacedAdapter], names: Sequence[str]) -> _Tables:
        from tinsmith.engine.cpu import adapters

        rows, sites, sizes = list[tuple[Any, ...]](), list[list[tuple[int, ...]]](), list[int]()
        for weights, start, stop in placed:
            rank, width = weights.pairs[names[0]].a.shape
            line = _line(rank, len(names))
            rows.append((stop - start, width, rank, len(names), 0, weights.scale, 0, 0, 0, 0, 0, 0, line))
            sites.append([_site(weights, name) for name in names])
            sizes.append((stop - start + 1) // 2 * 2 * line)
        starts = np.array([start for _, start, _ in placed])
        blocks = sum(adapters.blocks_of.py_func(stop - start) for _, start, stop in placed)
        offsets = np.cumsum([0, *sizes])
        return cls(np.array(rows, adapters.ADAPTER), np.array(sites, adapters.SITE), starts, offsets[:-1],
                   int(offsets[-1]), blocks)  # fmt: skip

    def call(self, function: Callable[[], Any], wide: Sequence[Tensor], **tensors: Tensor) -> None:
        """Call a function with outputs or their gradients, and other fields of ADAPTER."""
        from tinsmith.engine.cpu import adapters

        sites, table = self.sites.copy(), self.adapters.copy()
        lines = np.array([tensor.stride(0) for tensor in wide])
        sites["output_line"] = lines
        sites["outputs"] = [tensor.data_ptr() for tensor in wide] + self.starts[:, None] * (ITEM * lines)
        table["site_table"] = sites.ctypes.data + np.arange(len(sites)) * sites.strides[0]
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                table[LINES[name]] = tensor.stride(0)
                table[name] = tensor.data_ptr() + self.starts * (ITEM * tensor.stride(0))
            elif tensor.numel():
                table[name] = tensor.data_ptr() + self.offsets * ITEM
        call = np.array([(0, len(table), table.ctypes.data)], adapters.CALL)
        openmp.run(function(), call.ctypes.data, min(torch.get_num_threads(), self.blocks))


def _site(weights: AdapterWeights, name: str) -> tuple[int, ...]:
    """`cpu.adapters.SITE` of a projection without its outputs. Samplers need it at every step."""
    if name in weights.addresses:
        return weights.addresses[name]
    pair, gradients = weights.pairs[name], weights.gradients.get(name)
    buffers = (0, 0) if gradients is None else (gradients.a.data_ptr(), gradients.b.data_ptr())
    site = len(pair.b), 0, 0, pair.a.data_ptr(), pair.a.stride(0), pair.b.data_ptr(), pair.b.stride(0), *buffers
    if not weights.gradients:
        weights.addresses[name] = site
    return site


def _slot(rank: int) -> int:
    """Columns of narrow for each projection."""
    from tinsmith.engine.cpu import pairs

    return pairs.in_blocks.py_func(rank)


def _line(rank: int, projections: int) -> int:
    """`cpu.adapters.ADAPTER`'s line."""
    from tinsmith.engine.cpu import pairs

    return pairs.in_panels.py_func(projections * _slot(rank))


def _rows_of(tensor: Tensor) -> Tensor:
    """The tensor with the numbers of a row side by side."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def compiled_groups(placed: Sequence[PlacedAdapter]) -> tuple[list[CompiledAdapters], list[PlacedAdapter]]:
    """Adapters in a group for each set of modules, and those of ranks that compiled functions do not compute."""
    groups, others = dict[tuple[str, ...], list[PlacedAdapter]](), list[PlacedAdapter]()
    for entry in placed:
        if fits(entry[0]):
            groups.setdefault(tuple(entry[0].pairs), []).append(entry)
        else:
            others.append(entry)
    return [CompiledAdapters(members) for members in groups.values()], others


def fits(weights: AdapterWeights) -> bool:
    """Whether compiled functions compute adapters of this rank."""
    first = next(iter(weights.pairs.values()), None)
    return first is not None and first.a.shape[-2] % MULTIPLE_RANK == 0


def work_on(device: torch.device, dtype: torch.dtype, widths: Iterable[int]) -> bool:
    """Whether compiled functions compute adapters of this dtype and projections of these widths on this device, and
    give the results of products."""
    if not has_pair_products(device, dtype) or any(width % MULTIPLE_WIDTH for width in widths):
        return False
    try:
        check()
    except Exception:
        log.warning("The compiled adapters do not work here; all is slower without them.", exc_info=True)
        return False
    return True


def check() -> None:
    """Raises ValueError unless results are those of products."""
    compiled, expected = (
        _results(lambda placed: CompiledAdapters([placed])),
        _results(lambda placed: AdapterSlice(*placed)),
    )
    errors = [
        float((left - right).abs().max() / right.abs().max()) for left, right in zip(compiled, expected, strict=True)
    ]
    if not max(errors) < TOLERANCE:
        raise ValueError(f"results are wrong by {max(errors):.2g}")


def _results(group_of: Callable[[PlacedAdapter], AdapterGroup]) -> list[Tensor]:
    """Outputs and gradients of two small projections."""
    draw = torch.Generator().manual_seed(0)
    names, rank, width = ("left", "right"), 24, MULTIPLE_WIDTH
    shapes = [(rank, width), (width, rank)]

    def number(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    pairs = {name: LoraPair(*(number(*shape).bfloat16() for shape in shapes)) for name in names}
    gradients = {name: LoraPair(*(torch.zeros(shape, device="cpu") for shape in shapes)) for name in names}
    group = group_of((AdapterWeights(0.5, pairs, gradients), 1, CHECK_POSITIONS + 1))
    inputs, left, right, input_grad = (number(CHECK_POSITIONS + 2, width).bfloat16() for _ in range(4))
    narrow = group.forward(inputs, (left, right), names)
    group.backward(input_grad, (left, right), names, inputs, narrow)
    buffers = [buffer for name in names for buffer in (gradients[name].a, gradients[name].b)]
    return [tensor.float() for tensor in (left, right, input_grad, *buffers)]
