"""Matrices laid out in panels, and their products with float32 sums: of float32 numbers, or of bfloat16 ones in pairs.

The right side of a product is laid out in panels of TILE_COLUMNS columns, each [depth, TILE_COLUMNS]. Two bfloat16
numbers that follow each other in the depth are a pair: their panels are [depth / 2, TILE_COLUMNS, 2], and the left side
has the pairs of each row side by side, as in memory, or those of all rows: [depth / 2, rows, 2]. A float32 left side is
also multiplied with panels of bfloat16 numbers in words (`vectors.words_at`) and of float16 numbers. Pointers say which
numbers there are.

Functions that many others call are not compiled into these, which would take seconds more. Numba compiles them again
for each constant that they are called with, so places and sizes are made int64 before; strides are not, because
constant ones make a loop faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types  # pyright: ignore[reportAttributeAccessIssue] - one comes by a star
from numba.extending import overload  # pyright: ignore[reportAttributeAccessIssue] - it comes by a star

from tinsmith.engine.cpu.primitives import half_pointer, load, pointer, pointer_like, store
from tinsmith.engine.cpu.rows import copy_row, fill
from tinsmith.engine.cpu.tiles import (
    AMX_DEPTH,
    AMX_ROWS,
    PAIR_ROWS,
    TILE_COLUMNS,
    TILE_ROWS,
    amx_tile,
    pair_columns,
    pair_rows,
    panel_tile,
    transpose_rows,
)
from tinsmith.engine.cpu.vectors import HAS_32_REGISTERS, HAS_AMX

HALF_ROWS = PAIR_ROWS // 2
"""Rows of a smaller tile of pairs, for what is left of a matrix."""
MANY_ROWS, FEW_ROWS = (8, 4) if HAS_32_REGISTERS else (4, 2)
"""The same of float32."""
AS_FACTORS, BFLOAT16, FLOAT16 = 0, 1, 2
"""What the numbers of a panel are that float32 ones are multiplied with: float32, bfloat16 in words, or float16. Those
that are multiplied in pairs are as their factors too."""
DEPTH = 64
"""Float32 products that are added up in a row: rounding grows with the root of their number. Sums of so many are added
to the result."""
AHEAD = 8192
"""Bytes from a number of a panel to the one that is brought nearer with it. Processors do so within a page of 4096."""
PANEL_LINE = 2 * TILE_COLUMNS
"""Numbers of a panel from one pair to the next."""
BLOCK = TILE_COLUMNS // 2
"""Columns that are laid out together."""


@njit(inline="always")
def even(depth: Any) -> Any:
    """A depth in whole pairs."""
    return (depth + 1) // 2 * 2


@njit(inline="always")
def in_panels(columns: Any) -> Any:
    """A number of columns in whole panels."""
    return (columns + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS


@njit(inline="always")
def in_blocks(columns: Any) -> Any:
    """A number of columns in whole blocks."""
    return (columns + BLOCK - 1) // BLOCK * BLOCK


@njit(inline="always")
def lay_rows(
    target: Any, place: Any, line: Any, numbers: Any, start: Any, stride: Any, rows: Any, columns: Any
) -> None:
    """The first `columns` columns of a target [even(rows), line], from `place` on, are numbers[start + k stride + c] of
    rows k, and zeros after an odd number of them."""
    _lay_rows(target, np.int64(place), line, numbers, np.int64(start), np.int64(stride), np.int64(rows), columns)


@njit(inline="always")
def lay_in_order(
    target: Any, place: Any, line: Any, numbers: Any, start: Any, stride: Any, rows: Any, columns: Any
) -> None:
    """`lay_rows` of bfloat16 numbers with the second row of each pair before the first one: `panel_tile` adds the
    product of a pair's second number first, so that products are added in the order of the rows."""
    _lay_pairs(target, np.int64(place), 2 * line, numbers, np.int64(start), np.int64(stride), np.int64(rows), columns,
               np.int64(1))  # fmt: skip


def _lay_rows(
    target: Any, place: Any, line: Any, numbers: Any, start: Any, stride: Any, rows: Any, columns: Any
) -> None:
    """`lay_rows` of int64."""


@overload(_lay_rows)
def _lay_rows_of(target, place, line, numbers, start, stride, rows, columns):
    def whole(target, place, line, numbers, start, stride, rows, columns):
        _lay_floats(target, place, line, numbers, start, stride, rows, columns)

    def in_pairs(target, place, line, numbers, start, stride, rows, columns):
        _lay_pairs(target, place, 2 * line, numbers, start, stride, rows, columns, np.int64(0))

    return in_pairs if target.dtype == types.uint16 else whole


@njit(error_model="numpy")
def _lay_floats(target, place, line, numbers, start, stride, rows, columns):  # type: ignore[no-untyped-def]
    for k in range(rows):
        copy_row(target, place + k * line, numbers, start + k * stride, np.float32(1), columns)
    if rows % 2:
        fill(target, place + rows * line, place + rows * line + columns, np.float32(0))


@njit(error_model="numpy")
def _lay_pairs(target, place, line, numbers, start, stride, rows, columns, swaps):  # type: ignore[no-untyped-def]
    for k in range(0, rows, 2):
        at, first, c = place + k // 2 * line, start + k * stride, 0
        second = first + (stride if k + 1 < rows else 0)
        if swaps:
            first, second = second, first
        while c + BLOCK <= columns:
            pair_rows(target, at + 2 * c, numbers, first + c, second - first, 16)
            c += BLOCK
        if c + 8 <= columns:
            pair_rows(target, at + 2 * c, numbers, first + c, second - first, 8)
            c += 8
        for rest in range(c, columns):
            target[at + 2 * rest] = numbers[first + rest]
            target[at + 2 * rest + 1] = numbers[second + rest]
        if k + 1 == rows:
            for c in range(columns):
                target[at + 2 * c + 1 - swaps] = 0


@njit(inline="always")
def lay_depth(
    panel: Any, place: Any, numbers: Any, start: Any, stride: Any, depth: Any, last: Any, columns: Any
) -> None:  # fmt: skip
    """A block of columns of bfloat16 numbers, of which `columns`, a constant, are not zeros, and those after number
    `last` are like it; depth is a multiple of 8."""
    k = 0
    while k + 32 <= depth:
        pair_columns(panel, place + k // 2 * PANEL_LINE, numbers, start + k, stride, last, columns, 32)
        k += 32
    if k + 16 <= depth:
        pair_columns(panel, place + k // 2 * PANEL_LINE, numbers, start + k, stride, last, columns, 16)
        k += 16
    if k < depth:
        pair_columns(panel, place + k // 2 * PANEL_LINE, numbers, start + k, stride, last, columns, 8)


@njit(inline="always")
def lay_columns(panels: Any, column: Any, numbers: Any, start: Any, stride: Any, depth: Any, columns: Any) -> None:
    """The transposed matrix numbers [columns, depth] in panels from a column on, which begins a block; zeros follow to
    the end of a block. Of bfloat16 numbers, `columns` and depth are multiples of 8."""
    _lay_columns(panels, np.int64(column), numbers, np.int64(start), np.int64(stride), np.int64(depth),
                 np.int64(columns))  # fmt: skip


def _lay_columns(panels: Any, column: Any, numbers: Any, start: Any, stride: Any, depth: Any, columns: Any) -> None:
    """`lay_columns` of int64."""


@overload(_lay_columns)
def _lay_columns_of(panels, column, numbers, start, stride, depth, columns):
    def whole(panels, column, numbers, start, stride, depth, columns):
        _lay_float_columns(panels, column, numbers, start, stride, depth, columns)

    def in_pairs(panels, column, numbers, start, stride, depth, columns):
        _lay_pair_columns(panels, column, numbers, start, stride, depth, columns)

    return in_pairs if panels.dtype == types.uint16 else whole


@njit(error_model="numpy")
def _lay_pair_columns(panels, column, numbers, start, stride, depth, columns):  # type: ignore[no-untyped-def]
    for c in range(0, columns, BLOCK):
        at = column + c
        place = at // TILE_COLUMNS * TILE_COLUMNS * depth + 2 * (at % TILE_COLUMNS)
        if c + BLOCK <= columns:
            lay_depth(panels, place, numbers, start + c * stride, stride, depth, 15, 16)
        else:
            lay_depth(panels, place, numbers, start + c * stride, stride, depth, 7, 8)


@njit(error_model="numpy")
def _lay_float_columns(panels, column, numbers, start, stride, depth, columns):  # type: ignore[no-untyped-def]
    for c in range(0, columns, BLOCK):
        at, own, k, count = column + c, start + c * stride, 0, min(BLOCK, columns - c)
        place = at // TILE_COLUMNS * TILE_COLUMNS * depth + at % TILE_COLUMNS
        while k + BLOCK <= depth:
            transpose_rows(panels, place + k * TILE_COLUMNS, TILE_COLUMNS, numbers, own + k, stride, count, BLOCK)
            k += BLOCK
        if k + 8 <= depth:
            transpose_rows(panels, place + k * TILE_COLUMNS, TILE_COLUMNS, numbers, own + k, stride, count, 8)
            k += 8
        for rest in range(k, depth):
            for i in range(BLOCK):
                number = load(numbers, own + i * stride + rest) if i < count else np.float32(0)
                store(panels, place + rest * TILE_COLUMNS + i, number)


@njit(inline="always")
def multiply(
    outputs: Any, place: Any, line: Any, left: Any, first: Any, left_line: Any, right: Any, start: Any, depth: Any,
    factor: Any, rows: Any, adds: Any,
) -> None:  # fmt: skip
    """outputs[place + r line + c] = `factor` times the sum over k < `depth` of left[first + r left_line + k] times row
    k of a panel that begins at `start`, or plus it if `adds` is not 0, of `rows` rows and a panel's columns."""
    _multiply(outputs, np.int64(place), np.int64(line), left, np.int64(first), np.int64(left_line), right,
              np.int64(start), np.int64(depth), factor, np.int64(rows), np.int64(adds))  # fmt: skip


@njit(inline="always")
def multiply_transposed(
    outputs: Any, place: Any, line: Any, left: Any, first: Any, left_line: Any, right: Any, start: Any, right_line: Any,
    depth: Any, factor: Any, rows: Any, adds: Any,
) -> None:  # fmt: skip
    """The same of rows that are columns from number `first` on of [depth, left_line], and of columns from number
    `start` on of [depth, right_line], both as `lay_rows` lays rows out; depth is even."""
    _multiply_transposed(outputs, np.int64(place), np.int64(line), left, np.int64(first), left_line, right,
                         np.int64(start), right_line, np.int64(depth), factor, np.int64(rows),
                         np.int64(adds))  # fmt: skip


def multiply_weights(
    outputs: Any, place: Any, line: Any, left: Any, first: Any, left_line: Any, weights: Any, storage: Any, start: Any,
    depth: Any, rows: Any, adds: Any,
) -> None:  # fmt: skip
    """`multiply` with a panel of weights that begins with number `start` of those at an address."""


@overload(multiply_weights)
def _multiply_weights(outputs, place, line, left, first, left_line, weights, storage, start, depth, rows, adds):
    def stored(outputs, place, line, left, first, left_line, weights, storage, start, depth, rows, adds):
        if storage == BFLOAT16:
            multiply(outputs, place, line, left, first, left_line, pointer(np.int64(weights)), start, depth,
                     np.float32(1), rows, adds)  # fmt: skip
        elif storage == FLOAT16:
            multiply(outputs, place, line, left, first, left_line, half_pointer(weights), start, depth, np.float32(1),
                     rows, adds)  # fmt: skip
        else:
            multiply(outputs, place, line, left, first, left_line, pointer_like(left, weights), start, depth,
                     np.float32(1), rows, adds)  # fmt: skip

    def in_pairs(outputs, place, line, left, first, left_line, weights, storage, start, depth, rows, adds):
        multiply(outputs, place, line, left, first, left_line, pointer_like(left, weights), start, depth, np.float32(1),
                 rows, adds)  # fmt: skip

    return in_pairs if left.dtype == types.uint16 else stored


def _multiply(
    outputs: Any, place: Any, line: Any, left: Any, first: Any, left_line: Any, right: Any, start: Any, depth: Any,
    factor: Any, rows: Any, adds: Any,
) -> None:  # fmt: skip
    """`multiply` of int64."""


@overload(_multiply)
def _multiply_of(outputs, place, line, left, first, left_line, right, start, depth, factor, rows, adds):
    def whole(outputs, place, line, left, first, left_line, right, start, depth, factor, rows, adds):
        for k in range(0, max(depth, 1), DEPTH):
            _multiply_floats(outputs, place, line, left, first + k, left_line, 1, right, start + k * TILE_COLUMNS,
                             TILE_COLUMNS, min(DEPTH, depth - k), factor, rows, adds or k)  # fmt: skip

    def in_pairs(outputs, place, line, left, first, left_line, right, start, depth, factor, rows, adds):
        _multiply_rows(outputs, place, line, left, first, left_line, 2, right, start, PANEL_LINE, depth, factor, rows,
                       adds)  # fmt: skip

    return in_pairs if left.dtype == types.uint16 else whole


def _multiply_transposed(
    outputs: Any, place: Any, line: Any, left: Any, first: Any, left_line: Any, right: Any, start: Any, right_line: Any,
    depth: Any, factor: Any, rows: Any, adds: Any,
) -> None:  # fmt: skip
    """`multiply_transposed` of int64."""


@overload(_multiply_transposed)
def _multiply_transposed_of(
    outputs, place, line, left, first, left_line, right, start, right_line, depth, factor, rows, adds
):
    def whole(outputs, place, line, left, first, left_line, right, start, right_line, depth, factor, rows, adds):
        for k in range(0, max(depth, 1), DEPTH):
            _multiply_floats(outputs, place, line, left, first + k * left_line, np.int64(1), left_line, right,
                             start + k * right_line, right_line, min(DEPTH, depth - k), factor, rows,
                             adds or k)  # fmt: skip

    def in_pairs(outputs, place, line, left, first, left_line, right, start, right_line, depth, factor, rows, adds):
        _multiply_columns(outputs, place, line, left, 2 * first, np.int64(2), 2 * left_line, right, 2 * start,
                          2 * right_line, depth, factor, rows, adds)  # fmt: skip

    return in_pairs if left.dtype == types.uint16 else whole


@njit(error_model="numpy")
def _multiply_pairs(
    outputs, place, line, left, first, left_line, left_step, right, start, right_line, depth, factor, rows, adds
):  # type: ignore[no-untyped-def]
    _multiply_in_tiles(outputs, place, line, left, first, left_line, left_step, right, start, right_line, depth, factor,
                       rows, adds, PAIR_ROWS, HALF_ROWS, 1)  # fmt: skip


@njit(inline="always")
def _multiply_by_amx(
    outputs: Any, place: Any, line: Any, left: Any, first: Any, left_line: Any, left_step: Any, right: Any, start: Any,
    right_line: Any, depth: Any, factor: Any, rows: Any, adds: Any, by_rows: Any,
) -> None:  # fmt: skip
    """`amx_tile` of any number of rows, and the same of what is left of the depth."""
    done, row = depth // AMX_DEPTH * AMX_DEPTH, 0
    if done:
        while row + AMX_ROWS <= rows:
            amx_tile(outputs, place + row * line, line, left, first + row * left_line, left_line, left_step, right,
                     start, right_line, done, factor, AMX_ROWS, adds, by_rows, 2, AHEAD)  # fmt: skip
            row += AMX_ROWS
        if row + AMX_ROWS // 2 <= rows:
            amx_tile(outputs, place + row * line, line, left, first + row * left_line, left_line, left_step, right,
                     start, right_line, done, factor, AMX_ROWS // 2, adds, by_rows, 1, AHEAD)  # fmt: skip
            row += AMX_ROWS // 2
        if row < rows:
            amx_tile(outputs, place + row * line, line, left, first + row * left_line, left_line, left_step, right,
                     start, right_line, done, factor, rows - row, adds, by_rows, 0, AHEAD)  # fmt: skip
    if done < depth or not done:
        _multiply_pairs(outputs, place, line, left, first + done // 2 * left_step, left_line, left_step, right,
                        start + done // 2 * right_line, right_line, depth - done, factor, rows,
                        adds or done)  # fmt: skip


def _by_amx(by_rows: int) -> Any:
    """`_multiply_by_amx` as a function of its own."""

    @njit(error_model="numpy")
    def multiply_by_amx(
        outputs, place, line, left, first, left_line, left_step, right, start, right_line, depth, factor, rows, adds
    ):  # type: ignore[no-untyped-def]
        _multiply_by_amx(outputs, place, line, left, first, left_line, left_step, right, start, right_line, depth,
                         factor, rows, adds, by_rows)  # fmt: skip

    return multiply_by_amx


_multiply_rows, _multiply_columns = (_by_amx(1), _by_amx(0)) if HAS_AMX else (_multiply_pairs, _multiply_pairs)


@njit(error_model="numpy")
def _multiply_floats(
    outputs, place, line, left, first, left_line, left_step, right, start, right_line, depth, factor, rows, adds
):  # type: ignore[no-untyped-def]
    _multiply_in_tiles(outputs, place, line, left, first, left_line, left_step, right, start, right_line, depth, factor,
                       rows, adds, TILE_ROWS, MANY_ROWS, FEW_ROWS)  # fmt: skip


@njit(inline="always")
def _multiply_in_tiles(
    outputs: Any, place: Any, line: Any, left: Any, first: Any, left_line: Any, left_step: Any, right: Any, start: Any,
    right_line: Any, depth: Any, factor: Any, rows: Any, adds: Any, most: Any, many: Any, few: Any,
) -> None:  # fmt: skip
    """`panel_tile` of any number of rows: of `most`, then of `many`, `few` and 1, which are constants."""
    row = 0
    while row + most <= rows:
        panel_tile(outputs, place + row * line, line, left, first + row * left_line, left_line, left_step, right, start,
                   right_line, depth, factor, most, adds, AHEAD)  # fmt: skip
        row += most
    if row + many <= rows:
        panel_tile(outputs, place + row * line, line, left, first + row * left_line, left_line, left_step, right, start,
                   right_line, depth, factor, many, adds, AHEAD)  # fmt: skip
        row += many
    if few > 1 and row + few <= rows:
        panel_tile(outputs, place + row * line, line, left, first + row * left_line, left_line, left_step, right, start,
                   right_line, depth, factor, few, adds, AHEAD)  # fmt: skip
        row += few
    while row < rows:
        panel_tile(outputs, place + row * line, line, left, first + row * left_line, left_line, left_step, right, start,
                   right_line, depth, factor, 1, adds, AHEAD)  # fmt: skip
        row += 1
