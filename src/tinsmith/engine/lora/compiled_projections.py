"""Frozen matrices and adapters on a CPU, multiplied by `cpu.projections` in place of PyTorch's products.

One call computes all projections of an input with what an adapter adds to them. oneDNN's products of bfloat16 take 1.03
to 1.06 times as long for hundreds of rows and 1.1 to 1.7 for few, those of float32 1.0 and 1.0 to 3, and both depend on
the number of rows in the last bit.

Most checkpoints are bfloat16 or float16. A float32 matrix of such weights is kept as that, which takes half of the
memory, and is widened in registers: the products are those of float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from ctypes import addressof, c_int64, sizeof
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.cpu import openmp
from tinsmith.engine.cpu.arguments import address
from tinsmith.engine.cpu.instructions import kind_of
from tinsmith.engine.lora.adapter import AdapterPanels, AdapterWeights, LoraPair, PlacedAdapter

MULTIPLE_WIDTH = 32
"""What widths must be multiples of."""
CACHED_BYTES = 393_216
"""Of a block of rows, so that it stays in a core's second cache beside a panel."""
MOST_ROWS, LEAST_ROWS = 256, 32
THREAD_WORK = 1 << 18
"""Multiplications from which several threads compute a call."""


@dataclass(frozen=True, slots=True)
class Panels:
    """A frozen matrix W [out, in] and its bias, or a matrix for each expert, as compiled functions read them."""

    shape: tuple[int, int]
    """(out, in)."""
    dtype: torch.dtype
    """Of factors and products."""
    storage: int
    """What `cpu.panels` calls the numbers of the panels."""
    forward: Tensor
    """W^T in panels."""
    backward: Tensor | None
    """W in panels; None where each gradient of inputs makes them again, or where none is computed."""
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None, *, backward: bool = True) -> Panels:
        """Lay out a matrix, whose sizes are multiples of MULTIPLE_WIDTH."""
        return cls.of_experts(weight[None], bias, backward=backward)

    @classmethod
    def of_experts(cls, weights: Tensor, bias: Tensor | None = None, *, backward: bool = True) -> Panels:
        """Lay out the matrices [E, out, in] of experts."""
        _, out, width = weights.shape
        rows = [weight if weight.stride(1) == 1 else weight.contiguous() for weight in weights]
        storage, forward = next(_laid_out(rows))
        bias = None if bias is None else bias.contiguous()
        panels = cls((out, width), weights.dtype, storage, forward, None, bias)
        return replace(panels, backward=panels.transposed()) if backward else panels

    def transposed(self) -> Tensor:
        """W in panels."""
        if self.backward is not None:
            return self.backward
        backward, (out, width), functions = torch.empty_like(self.forward), self.shape, projections()
        for target, source in zip(backward, self.forward, strict=True):
            if self.storage:
                functions.transpose_halves(target.data_ptr(), source.data_ptr(), width, out, self.storage)
            elif self.dtype == torch.float32:
                functions.transpose_floats(address(target), address(source), width, out)
            else:
                functions.transpose_pairs(address(target), address(source), width, out)
        return backward


def _storages(dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
    """What panels of a dtype may consist of, as PyTorch and `cpu.panels` have it. The last represents all numbers."""
    from tinsmith.engine.cpu.panels import AS_FACTORS, BFLOAT16, FLOAT16

    halves = [(torch.bfloat16, BFLOAT16), (torch.float16, FLOAT16)] if dtype == torch.float32 else []
    return [*halves, (dtype, AS_FACTORS)]


def _laid_out(weights: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Panels of each kind that represents the matrices, after what `cpu.panels` calls it."""
    for dtype, storage in _storages(weights[0].dtype):
        forward = weights[0].new_empty(len(weights), weights[0].numel(), dtype=dtype)
        if all(_lay_out(panels, weight, storage) for panels, weight in zip(forward, weights, strict=True)):
            yield storage, forward


def _lay_out(panels: Tensor, weight: Tensor, storage: int) -> bool:
    """Lay out a matrix W [out, in] as panels of W^T. Returns whether these represent it."""
    (out, width), functions = weight.shape, projections()
    target = panels if panels.dtype == weight.dtype else weight.new_empty(weight.numel())
    functions.lay_weights(address(target), 0, address(weight), weight.stride(0), width, out)
    return target is panels or not functions.pack(panels.data_ptr(), address(target), weight.numel(), storage)


@dataclass(frozen=True, slots=True)
class AdapterTables:
    """What of the calls for some projections and adapters is the same in each."""

    adapters: Sequence[tuple[int, ...]]
    """`cpu.projections.ADAPTER` [n] without narrow and its gradients, by rows."""
    without_parts: Any
    """The same in memory, with 0 for both."""
    pairs: Any
    """`cpu.projections.PAIR` [n, projections] in memory."""
    offsets: dict[int, int]
    """Where each adapter's part of narrow begins, by its first row."""
    projections: int
    """How many share the input."""
    narrow_size: int
    rank: int
    """The highest."""

    @classmethod
    def of(cls, placed: Sequence[PlacedAdapter], names: Sequence[str]) -> AdapterTables:
        """The tables of adapters in the order of their rows, at the projections of an input."""
        a_panels, pairs = list[int](), list[int]()
        for weights, _, _ in placed:
            own, *numbers = _addresses(weights, names)
            a_panels.append(own)
            pairs += numbers
        return cls._of([(start, stop, weights) for weights, start, stop in placed], a_panels, pairs, names)

    @classmethod
    def of_experts(cls, runs: Sequence[tuple[int, int, int, AdapterWeights]], names: Sequence[str]) -> AdapterTables:
        """The same of adapters of experts: runs of rows (start, stop, expert, adapter). Matrices that experts share
        have no gradients here."""
        places = {id(weights): [_places_of_experts(weights, name) for name in names] for *_, weights in runs}
        pairs = [
            first + expert * step
            for _, _, expert, weights in runs
            for place in places[id(weights)]
            for first, step in zip(*place, strict=True)
        ]
        return cls._of([(start, stop, weights) for start, stop, _, weights in runs], [0] * len(runs), pairs, names)

    @classmethod
    def _of(
        cls,
        rows: Sequence[tuple[int, int, AdapterWeights]],
        a_panels: Sequence[int],
        numbers: Sequence[int],
        names: Sequence[str],
    ) -> AdapterTables:
        pairs, ranks = integers(numbers), [weights.pairs[names[0]].a.shape[-2] for *_, weights in rows]
        first, each = addressof(pairs), sizeof(pairs) // len(rows)
        lines = {rank: narrow_line(len(names), rank) for rank in set(ranks)}
        adapters, offsets, end = list[tuple[int, ...]](), dict[int, int](), 0
        for number, ((start, stop, weights), rank) in enumerate(zip(rows, ranks, strict=True)):
            scale = int(np.float64(weights.scale).view(np.int64))  # the table has integers alone
            adapters.append((start, stop, rank, scale, a_panels[number], first + number * each))
            offsets[start] = end
            end += (stop - start) * lines[rank]
        without_parts = integers([number for adapter in adapters for number in (*adapter, 0, 0)])
        return cls(adapters, without_parts, pairs, offsets, len(names), end, max(ranks))

    def with_parts(self, narrow: Tensor | None = None, narrow_grads: Tensor | None = None) -> Any:
        """`cpu.projections.ADAPTER` [n] in memory, each with its part of these."""
        parts = [
            (0, 0) if tensor is None or not tensor.numel() else (tensor.data_ptr(), tensor.itemsize)
            for tensor in (narrow, narrow_grads)
        ]
        if not any(start for start, _ in parts):
            return self.without_parts
        values = list[int]()
        for adapter, offset in zip(self.adapters, self.offsets.values(), strict=True):
            values += adapter
            values += [start + offset * size for start, size in parts]
        return integers(values)


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Blocks of rows, each of which is multiplied with one of several matrices."""

    table: Any
    """`cpu.projections.BLOCK_OF_ROWS` [count] in memory."""
    count: int
    most: int
    """Rows of the largest."""

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int, int]], depth: int, dtype: torch.dtype) -> RowBlocks:
        """Runs of rows as (matrix, start, stop), for products of this depth."""
        values, most = list[int](), 1
        for matrix, start, stop in runs:
            size = _block(stop - start, depth, dtype)
            for first in range(start, stop, size):
                last = min(first + size, stop)
                values += first, last, matrix
                most = max(most, last - first)
        return cls(integers(values), len(values) // 3, most)


@dataclass(frozen=True, slots=True)
class ProjectionCall:
    """Tensors of a call: of one dtype, the numbers of a row side by side."""

    inputs: Tensor
    """[rows, in], or the gradient of these."""
    wide: Sequence[Tensor]
    """[rows, out] of each projection: the outputs or their gradients."""
    panels: Sequence[Panels] | None
    """The frozen matrices; None where only adapters are computed."""
    tables: AdapterTables | None
    blocks: RowBlocks | None = None
    """The rows of each matrix, where panels have several."""

    def fill_outputs(self, narrow: Tensor | None = None) -> None:
        """Fill the outputs, or add to them without `panels`; and fill narrow."""
        call, threads = self.prepared(narrow)
        openmp.run(projections().forward_function(kind_of(self.inputs.dtype)), addressof(call), threads)

    def prepared(self, narrow: Tensor | None = None) -> tuple[Any, int]:
        """`cpu.projections.CALL` in memory that fills the outputs, and its threads."""
        weights = None if self.panels is None else [panels.forward for panels in self.panels]
        columns = sum([tensor.shape[1] for tensor in self.wide])
        adapters = None if self.tables is None else self.tables.with_parts(narrow)
        return self._prepared(weights, self.inputs.shape[1], columns, adapters)

    def fill_input_grads(self, narrow_grads: Tensor | None = None, *, adds: bool) -> None:
        """Fill the gradients of the inputs, or add to them; and fill those of narrow."""
        weights = None if self.panels is None else [each.transposed() for each in self.panels]
        depth = sum([tensor.shape[1] for tensor in self.wide])
        adapters = None if self.tables is None else self.tables.with_parts(narrow_grads=narrow_grads)
        call, threads = self._prepared(weights, depth, self.inputs.shape[1], adapters, adds=adds)
        openmp.run(projections().backward_function(kind_of(self.inputs.dtype)), addressof(call), threads)

    def add_gradients(self, narrow: Tensor, narrow_grads: Tensor) -> None:
        """Add to the gradients of the adapters."""
        assert self.tables is not None
        call = self._call(self._sites(None), 1, 1, self.tables.with_parts(narrow, narrow_grads))
        function = projections().gradient_function(kind_of(self.inputs.dtype))
        openmp.run(function, addressof(call), torch.get_num_threads())

    def _prepared(
        self, weights: Sequence[Tensor] | None, depth: int, columns: int, adapters: Any, *, adds: bool = False
    ) -> tuple[Any, int]:
        """The call of a function of products of this depth, whose threads divide rows and columns among them."""
        rows = self.inputs.shape[0]
        threads = torch.get_num_threads() if rows * depth * columns >= THREAD_WORK else 1
        groups = 1
        if weights is None:  # each block lays out all of an adapter again
            block = _even_block(rows, threads)
        else:
            block = _block(rows, depth, self.inputs.dtype) if self.blocks is None else self.blocks.most
            groups = -(-2 * threads * block // rows) if threads > 1 else 1
        panels = max(1, -(-columns // (MULTIPLE_WIDTH * groups)))
        return self._call(self._sites(weights), block, panels, adapters, adds=adds), threads

    def _sites(self, weights: Sequence[Tensor] | None) -> Any:
        """`cpu.projections.SITE` [projections]."""
        values = list[int]()
        for number, tensor in enumerate(self.wide):
            bias = None if self.panels is None else self.panels[number].bias
            values += (
                tensor.shape[1],
                0 if weights is None else weights[number].data_ptr(),
                0 if self.panels is None else self.panels[number].storage,
                0 if bias is None else bias.data_ptr(),
                tensor.data_ptr(),
                tensor.stride(0),
            )
        return integers(values)

    def _call(self, sites: Any, block: int, panels: int, adapters: Any, *, adds: bool = False) -> Any:
        """`cpu.projections.CALL` in memory; the tables that it leads to live as long as it."""
        inputs, tables = self.inputs, self.tables
        rows, width = inputs.shape
        count, rank, table = (0, 0, 0) if tables is None else (len(tables.adapters), tables.rank, addressof(adapters))
        blocks, block_table = -(-rows // block), 0
        if self.blocks is not None:
            blocks, block_table = self.blocks.count, addressof(self.blocks.table)
        call = integers(
            (0, rows, block, blocks, block_table, panels, width, inputs.data_ptr(), inputs.stride(0), adds,
             len(self.wide), addressof(sites), count, table, rank)
        )  # fmt: skip
        call.tables = sites, adapters, self.blocks
        return call


def projections() -> Any:
    """`cpu.projections`, which is imported with Numba."""
    from tinsmith.engine.cpu import projections

    return projections


def integers(values: Sequence[int]) -> Any:
    """An array of int64 in memory."""
    return (c_int64 * len(values))(*values)


def narrow_line(projections: int, rank: int) -> int:
    """Numbers of a row of narrow, as `cpu.projections.line_of` has it."""
    from tinsmith.engine.cpu.panels import in_panels

    return in_panels.py_func(projections * narrow_slot(rank))


def narrow_slot(rank: int) -> int:
    """Columns of narrow for each projection."""
    from tinsmith.engine.cpu.panels import in_blocks

    return in_blocks.py_func(rank)


def fit(widths: Iterable[int]) -> bool:
    """Whether compiled functions compute projections of these widths."""
    return not any(width % MULTIPLE_WIDTH for width in widths)


def rows_of(tensor: Tensor) -> Tensor:
    """The tensor with the numbers of a row side by side: compiled functions read no other."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _block(rows: int, width: int, dtype: torch.dtype) -> int:
    """Rows of a block of a matrix [rows, width], which stays in a core's second cache."""
    fitting = max(LEAST_ROWS, min(MOST_ROWS, CACHED_BYTES // (dtype.itemsize * width))) // 8 * 8
    return max(1, min(rows, fitting))


def _even_block(rows: int, threads: int) -> int:
    """Rows of a block, a multiple of 8, of which each thread gets about as many."""
    blocks = threads * max(1, -(-rows // (threads * MOST_ROWS)))
    return max(1, -(-rows // (8 * blocks))) * 8


def _addresses(weights: AdapterWeights, names: Sequence[str]) -> tuple[int, ...]:
    """The address of panels of A of all projections, and `cpu.projections.PAIR` of each. What is not trained is laid
    out at its first use: samplers read it at every step."""
    if weights.gradients:
        places = [_places(weights.pairs[name], weights.gradients.get(name)) for name in names]
        return 0, *(number for place in places for number in place)
    if names[0] not in weights.panels:
        weights.panels[names[0]] = _laid_out_pairs([weights.pairs[name] for name in names])
    return weights.panels[names[0]].addresses


def _laid_out_pairs(pairs: Sequence[LoraPair]) -> AdapterPanels:
    rank, width = pairs[0].a.shape
    a_panels = pairs[0].a.new_zeros(narrow_line(len(pairs), rank) * width)
    b_panels = [pair.b.new_empty(pair.b.numel()) for pair in pairs]
    for number, (pair, panels) in enumerate(zip(pairs, b_panels, strict=True)):
        own = number * narrow_slot(rank), address(pair.a), pair.a.stride(0), width, rank
        projections().lay_weights(address(a_panels), *own)
        projections().lay_weights(address(panels), 0, address(pair.b), pair.b.stride(0), rank, len(pair.b))
    places = [_places(pair, None, panels.data_ptr()) for pair, panels in zip(pairs, b_panels, strict=True)]
    addresses = a_panels.data_ptr(), *(number for place in places for number in place)
    return AdapterPanels((a_panels, *b_panels), addresses)


def _places(pair: LoraPair, gradients: LoraPair | None, b_panels: int = 0) -> tuple[int, ...]:
    """`cpu.projections.PAIR`."""
    buffers = (0, 0) if gradients is None else (gradients.a.data_ptr(), gradients.b.data_ptr())
    return pair.a.data_ptr(), pair.a.stride(-2), pair.b.data_ptr(), pair.b.stride(-2), b_panels, *buffers


def _places_of_experts(weights: AdapterWeights, name: str) -> tuple[Sequence[int], Sequence[int]]:
    """`cpu.projections.PAIR` of the first expert, and how much more that of each next one is."""
    pair, gradients = weights.pairs[name], weights.gradients.get(name)
    matrices = [pair.a, pair.b, *((gradients.a, gradients.b) if gradients else ())]
    steps = [matrix.stride(0) * matrix.itemsize if len(matrix) > 1 else 0 for matrix in matrices]
    a, b, a_grads, b_grads = (*steps, 0, 0)[:4]
    *own, of_a, of_b = _places(pair, gradients)
    return (*own, of_a if a_grads else 0, of_b if b_grads else 0), (a, 0, b, 0, 0, a_grads, b_grads)
