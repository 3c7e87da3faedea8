"""Frozen matrices and adapters on a CPU, multiplied by `cpu.projections` in place of PyTorch's products.

One call computes all projections of an input with what an adapter adds to them. oneDNN's products of bfloat16 take 1.03
to 1.06 times as long for hundreds of rows and 1.1 to 1.7 for few, those of float32 1.0 and 1.0 to 3, and both depend on
the number of rows in the last bit.

Most checkpoints are bfloat16 or float16. A float32 matrix of such weights is kept as that, which takes half of the
memory, and is widened in registers: the products are those of float32.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from ctypes import addressof, c_int64, sizeof
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinsmith.engine.cpu import openmp
from tinsmith.engine.cpu.arguments import address
from tinsmith.engine.cpu.instructions import kind_of
from tinsmith.engine.lora.adapter import AdapterWeights, PlacedAdapter

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
    """W in panels."""
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
        packed = _packed(rows, backward=backward) if weights.dtype == torch.float32 else None
        storage, forward, transposed = packed or _laid_out(rows, backward=backward)
        own_bias = None if bias is None else bias.contiguous()
        return cls((out, width), weights.dtype, storage, forward, transposed, own_bias)


def _laid_out(weights: Sequence[Tensor], *, backward: bool) -> tuple[int, Tensor, Tensor | None]:
    """Matrices [out, in] and the transposed ones as panels, after how these are stored."""
    from tinsmith.engine.cpu.panels import AS_FACTORS

    out, width = weights[0].shape
    forward = weights[0].new_empty(len(weights), out * width)
    transposed = torch.empty_like(forward) if backward else None
    for number, weight in enumerate(weights):
        own = address(weight), weight.stride(0)
        projections().lay_weights(address(forward[number]), *own, width, out)
        if transposed is not None:
            projections().lay_transposed(address(transposed[number]), *own, out, width)
    return AS_FACTORS, forward, transposed


def _packed(weights: Sequence[Tensor], *, backward: bool) -> tuple[int, Tensor, Tensor | None] | None:
    """The same of float32 as panels of bfloat16 or float16 numbers; None if neither represents them."""
    from tinsmith.engine.cpu.panels import BFLOAT16, FLOAT16

    out, width = weights[0].shape
    for dtype, storage in ((torch.bfloat16, BFLOAT16), (torch.float16, FLOAT16)):
        forward = weights[0].new_empty(len(weights), out * width, dtype=dtype)
        places = [(address(weight), weight.stride(0)) for weight in weights]
        lost = (
            projections().pack_weights(panel.data_ptr(), *own, width, out, storage)
            for panel, own in zip(forward, places, strict=True)
        )
        if any(lost):
            continue
        transposed = torch.empty_like(forward) if backward else None
        for panel, own in zip(() if transposed is None else transposed, places, strict=False):
            projections().pack_transposed(panel.data_ptr(), *own, out, width, storage)
        return storage, forward, transposed
    return None


@dataclass(frozen=True, slots=True)
class AdapterTables:
    """What of the calls for some projections and adapters is the same in each."""

    adapters: Sequence[tuple[int, ...]]
    """`cpu.projections.ADAPTER` [n] without narrow and its gradients, by rows."""
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
        pairs = [number for weights, _, _ in placed for name in names for number in _pair(weights, name)]
        return cls._of([(start, stop, weights) for weights, start, stop in placed], pairs, names)

    @classmethod
    def of_experts(cls, runs: Sequence[tuple[int, int, int, AdapterWeights]], names: Sequence[str]) -> AdapterTables:
        """The same of adapters of experts: runs of rows (start, stop, expert, adapter). Matrices that experts share
        have no gradients here."""
        places = {id(weights): [_ExpertPair.of(weights, name) for name in names] for *_, weights in runs}
        pairs = [
            number
            for _, _, expert, weights in runs
            for pair in places[id(weights)]
            for number in pair.of_expert(expert)
        ]
        return cls._of([(start, stop, weights) for start, stop, _, weights in runs], pairs, names)

    @classmethod
    def _of(
        cls, rows: Sequence[tuple[int, int, AdapterWeights]], numbers: Sequence[int], names: Sequence[str]
    ) -> AdapterTables:
        pairs, ranks = integers(numbers), [weights.pairs[names[0]].a.shape[-2] for *_, weights in rows]
        first, each = addressof(pairs), sizeof(pairs) // len(rows)
        lines = {rank: narrow_line(len(names), rank) for rank in set(ranks)}
        adapters, offsets, end = list[tuple[int, ...]](), dict[int, int](), 0
        for number, ((start, stop, weights), rank) in enumerate(zip(rows, ranks, strict=True)):
            adapters.append((start, stop, rank, _bits(weights.scale), first + number * each))
            offsets[start] = end
            end += (stop - start) * lines[rank]
        return cls(adapters, pairs, offsets, len(names), end, max(ranks))

    def with_parts(self, narrow: Tensor | None = None, narrow_grads: Tensor | None = None) -> Any:
        """`cpu.projections.ADAPTER` [n] in memory, each with its part of these."""
        values = list[int]()
        parts = [
            (0, 0) if tensor is None or not tensor.numel() else (tensor.data_ptr(), tensor.itemsize)
            for tensor in (narrow, narrow_grads)
        ]
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
        weights = None if self.panels is None else [panels.forward for panels in self.panels]
        columns = sum([tensor.shape[1] for tensor in self.wide])
        adapters = None if self.tables is None else self.tables.with_parts(narrow)
        function = projections().forward_function(kind_of(self.inputs.dtype))
        self._run(function, weights, self.inputs.shape[1], columns, adapters)

    def fill_input_grads(self, narrow_grads: Tensor | None = None, *, adds: bool) -> None:
        """Fill the gradients of the inputs, or add to them; and fill those of narrow."""
        weights = None if self.panels is None else [_transposed(panels) for panels in self.panels]
        depth = sum([tensor.shape[1] for tensor in self.wide])
        adapters = None if self.tables is None else self.tables.with_parts(narrow_grads=narrow_grads)
        function = projections().backward_function(kind_of(self.inputs.dtype))
        self._run(function, weights, depth, self.inputs.shape[1], adapters, adds=adds)

    def add_gradients(self, narrow: Tensor, narrow_grads: Tensor) -> None:
        """Add to the gradients of the adapters."""
        assert self.tables is not None
        call = self._call(self._sites(None), 1, 1, self.tables.with_parts(narrow, narrow_grads))
        function = projections().gradient_function(kind_of(self.inputs.dtype))
        openmp.run(function, addressof(call), torch.get_num_threads())

    def _run(
        self,
        function: Any,
        weights: Sequence[Tensor] | None,
        depth: int,
        columns: int,
        adapters: Any,
        *,
        adds: bool = False,
    ) -> None:
        """Call a function of products of this depth, whose threads divide rows and columns among them."""
        rows = self.inputs.shape[0]
        threads = torch.get_num_threads() if rows * depth * columns >= THREAD_WORK else 1
        groups = 1
        if weights is None:  # each block lays out all of an adapter again
            block = _even_block(rows, threads)
        else:
            block = _block(rows, depth, self.inputs.dtype) if self.blocks is None else self.blocks.most
            groups = -(-2 * threads * block // rows) if threads > 1 else 1
        panels = max(1, -(-columns // (MULTIPLE_WIDTH * groups)))
        call = self._call(self._sites(weights), block, panels, adapters, adds=adds)
        openmp.run(function, addressof(call), threads)

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


def _transposed(panels: Panels) -> Tensor:
    assert panels.backward is not None
    return panels.backward


def _bits(number: float) -> int:
    """The bits of a double as an integer."""
    (bits,) = struct.unpack("q", struct.pack("d", number))
    return bits


def _pair(weights: AdapterWeights, name: str) -> tuple[int, ...]:
    """`cpu.projections.PAIR`. Samplers need it at every step."""
    if name in weights.addresses:
        return weights.addresses[name]
    pair, gradients = weights.pairs[name], weights.gradients.get(name)
    buffers = (0, 0) if gradients is None else (gradients.a.data_ptr(), gradients.b.data_ptr())
    own = pair.a.data_ptr(), pair.a.stride(0), pair.b.data_ptr(), pair.b.stride(0), *buffers
    if not weights.gradients:
        weights.addresses[name] = own
    return own


@dataclass(frozen=True, slots=True)
class _ExpertPair:
    """Addresses of an expert site's matrices and gradients, and bytes from one expert's to the next."""

    a: int
    a_step: int
    a_line: int
    b: int
    b_step: int
    b_line: int
    a_grads: int
    a_grads_step: int
    b_grads: int
    b_grads_step: int

    @classmethod
    def of(cls, weights: AdapterWeights, name: str) -> _ExpertPair:
        pair, gradients = weights.pairs[name], weights.gradients.get(name)
        values = list[int]()
        for matrix in (pair.a, pair.b):
            values += (*_place(matrix), matrix.stride(1))
        for matrix in () if gradients is None else (gradients.a, gradients.b):
            values += _place(matrix) if len(matrix) > 1 else (0, 0)
        return cls(*values, *[0] * (10 - len(values)))

    def of_expert(self, expert: int) -> tuple[int, ...]:
        """`cpu.projections.PAIR`."""
        return (
            self.a + expert * self.a_step,
            self.a_line,
            self.b + expert * self.b_step,
            self.b_line,
            self.a_grads + expert * self.a_grads_step,
            self.b_grads + expert * self.b_grads_step,
        )


def _place(matrix: Tensor) -> tuple[int, int]:
    """The address of the matrices [E, rows, columns] of experts, or of [1, rows, columns] that they share, and bytes
    from one to the next."""
    return matrix.data_ptr(), matrix.stride(0) * matrix.itemsize if len(matrix) > 1 else 0
