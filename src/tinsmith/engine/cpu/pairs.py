"""Matrices of bfloat16 numbers laid out as pairs, and their products with float32 sums.

Two numbers that follow each other in the depth of a product are a pair. The right side of a product is laid out in
panels of PAIR_COLUMNS columns, each [depth / 2, PAIR_COLUMNS, 2]. The left side has the pairs of each row side by side,
as in memory, or those of all rows: [depth / 2, rows, 2].

Functions that many others call are not compiled into these, which would take seconds more. Numba compiles them again
for each constant that they are called with, so places and sizes are made int64 before; strides are not, because
constant ones make a loop faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tinsmith.engine.cpu.tiles import PAIR_COLUMNS, PAIR_ROWS, pair_columns, pair_rows, pair_tile

HALF_ROWS = PAIR_ROWS // 2
"""Rows of a smaller tile, for what is left of a matrix."""
PANEL_LINE = 2 * PAIR_COLUMNS
"""Numbers of a panel from one pair to the next."""
BLOCK = PAIR_COLUMNS // 2
"""Columns that are laid out together."""


@njit(inline="always")
def even(depth: Any) -> Any:
    """A depth in whole pairs."""
    return (depth + 1) // 2 * 2


@njit(inline="always")
def in_panels(columns: Any) -> Any:
    """A number of columns in whole panels."""
    return (columns + PAIR_COLUMNS - 1) // PAIR_COLUMNS * PAIR_COLUMNS


@njit(inline="always")
def in_blocks(columns: Any) -> Any:
    """A number of columns in whole blocks."""
    return (columns + BLOCK - 1) // BLOCK * BLOCK


@njit(inline="always")
def lay_rows(
    target: Any, place: Any, line: Any, numbers: Any, start: Any, stride: Any, rows: Any, columns: Any
) -> None:
    """target[place + k / 2 line + 2 c + k % 2] = numbers[start + k stride + c] of `rows` rows k, and zeros after an odd
    number of them."""
    _lay_rows(target, np.int64(place), line, numbers, np.int64(start), np.int64(stride), np.int64(rows), columns,
              np.int64(0))  # fmt: skip


@njit(inline="always")
def lay_in_order(
    target: Any, place: Any, line: Any, numbers: Any, start: Any, stride: Any, rows: Any, columns: Any
) -> None:
    """`lay_rows` with the second row of each pair before the first one: `pair_tile` adds the product of a pair's second
    number first, so that products are added in the order of the rows."""
    _lay_rows(target, np.int64(place), line, numbers, np.int64(start), np.int64(stride), np.int64(rows), columns,
              np.int64(1))  # fmt: skip


@njit(error_model="numpy")
def _lay_rows(target, place, line, numbers, start, stride, rows, columns, swaps):  # type: ignore[no-untyped-def]
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
    """A block of columns, of which `columns`, a constant, are not zeros, and those after number `last` are like it;
    depth is a multiple of 8."""
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
    """The transposed matrix numbers [columns, depth] in panels [panels, depth / 2, PAIR_COLUMNS, 2] from a column on,
    which begins a block; `columns` and depth are multiples of 8, and zeros follow to the end of a block."""
    _lay_columns(panels, np.int64(column), numbers, np.int64(start), np.int64(stride), np.int64(depth),
                 np.int64(columns))  # fmt: skip


@njit(error_model="numpy")
def _lay_columns(panels, column, numbers, start, stride, depth, columns):  # type: ignore[no-untyped-def]
    for c in range(0, columns, BLOCK):
        at = column + c
        place = at // PAIR_COLUMNS * PAIR_COLUMNS * depth + 2 * (at % PAIR_COLUMNS)
        if c + BLOCK <= columns:
            lay_depth(panels, place, numbers, start + c * stride, stride, depth, 15, 16)
        else:
            lay_depth(panels, place, numbers, start + c * stride, stride, depth, 7, 8)


@njit(inline="always")
def multiply_pairs(
    outputs: Any, place: Any, line: Any, left: Any, first: Any, left_line: Any, left_step: Any, right: Any, start: Any,
    right_line: Any, depth: Any, factor: Any, rows: Any, adds: Any,
) -> None:  # fmt: skip
    """`pair_tile` of any number of rows."""
    _multiply(outputs, np.int64(place), np.int64(line), left, np.int64(first), np.int64(left_line), left_step, right,
              np.int64(start), right_line, np.int64(depth), factor, np.int64(rows), np.int64(adds))  # fmt: skip


@njit(error_model="numpy")
def _multiply(
    outputs, place, line, left, first, left_line, left_step, right, start, right_line, depth, factor, rows, adds
):  # type: ignore[no-untyped-def]
    row = 0
    while row + PAIR_ROWS <= rows:
        pair_tile(outputs, place + row * line, line, left, first + row * left_line, left_line, left_step, right, start,
                  right_line, depth, factor, PAIR_ROWS, adds)  # fmt: skip
        row += PAIR_ROWS
    if row + HALF_ROWS <= rows:
        pair_tile(outputs, place + row * line, line, left, first + row * left_line, left_line, left_step, right, start,
                  right_line, depth, factor, HALF_ROWS, adds)  # fmt: skip
        row += HALF_ROWS
    while row < rows:
        pair_tile(outputs, place + row * line, line, left, first + row * left_line, left_line, left_step, right, start,
                  right_line, depth, factor, 1, adds)  # fmt: skip
        row += 1
