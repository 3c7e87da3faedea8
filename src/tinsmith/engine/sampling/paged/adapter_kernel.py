"""`adapter_slots.add_by_operators` as Triton kernels: two for all projections of one input, of any number of slots.

The first multiplies by A, a part of the input's columns in each program, and leaves the parts' sums; the second adds
these up in order, keeps each row's own slot, scales, and adds the product with B to the outputs. Blocks of slots that
serve no row of a block are skipped. How columns are divided depends on nothing but their number, so a row's numbers do
not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from tinsmith.engine.lora.adapter import LoraPair

PROJECTIONS = 3
"""Projections of one input that a kernel serves: q, k and v."""
ROWS = 64
"""Rows of a program, at most."""
OUTPUTS = 64
"""Output columns of a program."""
BLOCK = 64
"""Input columns that are multiplied at once."""
WIDE = 4096
"""More input columns than this are divided into longer parts."""


def add_in_place(
    inputs: Tensor, outputs: Sequence[Tensor], pairs: Sequence[LoraPair], own: Tensor, scales: Tensor
) -> None:
    """See `adapter_slots.AddProducts`."""
    for first in range(0, len(outputs), PROJECTIONS):
        _add(inputs, outputs[first : first + PROJECTIONS], pairs[first : first + PROJECTIONS], own, scales)


def _add(inputs: Tensor, outputs: Sequence[Tensor], pairs: Sequence[LoraPair], own: Tensor, scales: Tensor) -> None:
    (rows, width), ranks, count = inputs.shape, own.shape[1], len(outputs)
    part = 256 if width <= WIDE else 512
    parts = -(-width // part)
    sums = torch.empty(count, parts, rows, ranks, dtype=torch.float32, device=inputs.device)
    blocks = {"ROWS": min(ROWS, max(16, triton.next_power_of_2(rows))), "RANKS": _rank_block(ranks), "COLUMNS": ranks}
    row_blocks, rank_blocks = triton.cdiv(rows, blocks["ROWS"]), triton.cdiv(ranks, blocks["RANKS"])
    some = [*range(count), *[0] * (PROJECTIONS - count)]  # arguments beyond `count` are not used
    multiply_a[(parts, row_blocks * rank_blocks, count)](  # pyright: ignore[reportIndexIssue]
        *(inputs, *(pairs[number].a for number in some), own, sums, rows, inputs.stride(0)),
        RANK_BLOCKS=rank_blocks,
        PART=part,
        WIDTH=width,
        BLOCK=BLOCK,
        **blocks,
    )
    widths = [outputs[number].shape[1] for number in some]
    add_b[(triton.cdiv(max(widths), OUTPUTS), row_blocks, count)](  # pyright: ignore[reportIndexIssue]
        *(sums, *(pairs[number].b for number in some), *(outputs[number] for number in some), own, scales, rows),
        *(outputs[number].stride(0) for number in some),
        **{f"WIDTH_{number}": width for number, width in enumerate(widths)},
        PARTS=parts,
        OUTPUTS=OUTPUTS,
        **blocks,
    )


def _rank_block(ranks: int) -> int:
    """Columns of slots in a block: few, so that blocks that serve no row are skipped."""
    return max(16, min(32, triton.next_power_of_2(ranks)))


@triton.jit
def pick(number, first, second, third):
    """The argument of a projection."""
    chosen = first
    if number == 1:
        chosen = second
    if number == 2:
        chosen = third
    return chosen


@triton.jit
def load_own(own, row, rows, rank, COLUMNS: tl.constexpr):
    """Which columns are of a row's own slot, 0 or 1."""
    inside = (row[:, None] < rows) & (rank[None, :] < COLUMNS)
    return tl.load(own + row[:, None] * COLUMNS + rank[None, :], mask=inside, other=0).to(tl.int32)


@triton.jit
def multiply_a(
    inputs, a_0, a_1, a_2, own, sums, rows, INPUT_STRIDE,
    RANK_BLOCKS: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The product of a block of rows and a part of the input's columns with a block of A's rows."""
    part, number = tl.program_id(0), tl.program_id(2)
    row = (tl.program_id(1) // RANK_BLOCKS) * ROWS + tl.arange(0, ROWS)
    rank = (tl.program_id(1) % RANK_BLOCKS) * RANKS + tl.arange(0, RANKS)
    if tl.max(tl.max(load_own(own, row, rows, rank, COLUMNS), 1), 0) == 0:
        return
    a = pick(number, a_0, a_1, a_2)
    acc = tl.zeros([ROWS, RANKS], tl.float32)
    for start in range(0, PART, BLOCK):
        column = part * PART + start + tl.arange(0, BLOCK)
        inside = column < WIDTH
        x = tl.load(
            inputs + row[:, None] * INPUT_STRIDE + column[None, :],
            mask=(row[:, None] < rows) & inside[None, :],
            other=0.0,
        )
        matrix = tl.load(
            a + rank[None, :] * WIDTH + column[:, None], mask=(rank[None, :] < COLUMNS) & inside[:, None], other=0.0
        )
        acc += tl.dot(x, matrix, input_precision="ieee")
    target = ((number * tl.num_programs(0) + part) * rows + row[:, None]) * COLUMNS + rank[None, :]
    tl.store(sums + target, acc, mask=(row[:, None] < rows) & (rank[None, :] < COLUMNS))


@triton.jit
def add_b(
    sums, b_0, b_1, b_2, output_0, output_1, output_2, own, scales, rows, STRIDE_0, STRIDE_1, STRIDE_2,
    WIDTH_0: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr, PARTS: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add s B A x to a block of rows and columns of an output."""
    number = tl.program_id(2)
    width, stride = pick(number, WIDTH_0, WIDTH_1, WIDTH_2), pick(number, STRIDE_0, STRIDE_1, STRIDE_2)
    if tl.program_id(0) * OUTPUTS >= width:
        return
    b, output = pick(number, b_0, b_1, b_2), pick(number, output_0, output_1, output_2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    scale = tl.load(scales + row, mask=row < rows, other=0.0)
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, COLUMNS, RANKS):
        rank = start + tl.arange(0, RANKS)
        owned = load_own(own, row, rows, rank, COLUMNS)
        if tl.max(tl.max(owned, 1), 0) > 0:
            narrow = tl.zeros([ROWS, RANKS], tl.float32)
            for part in range(0, PARTS):
                source = ((number * PARTS + part) * rows + row[:, None]) * COLUMNS + rank[None, :]
                narrow += tl.load(sums + source, mask=owned > 0, other=0.0)
            narrow = (narrow * scale[:, None]).to(b.dtype.element_ty)
            matrix = tl.load(
                b + column[None, :] * COLUMNS + rank[:, None],
                mask=(column[None, :] < width) & (rank[:, None] < COLUMNS),
                other=0.0,
            )
            acc += tl.dot(narrow, matrix, input_precision="ieee")
    inside = (row[:, None] < rows) & (column[None, :] < width)
    place = output + row[:, None] * stride + column[None, :]
    tl.store(
        place, (tl.load(place, mask=inside, other=0.0).to(tl.float32) + acc).to(output.dtype.element_ty), mask=inside
    )
