"""What an adapter adds to projections that share their input, and its gradients, as compiled functions in bfloat16.

    narrow = A x        output += s B narrow
    narrow grad = B^T output grad        input grad += s A^T narrow grad        A grad += s narrow grad x^T
                                                                                B grad += s output grad narrow^T

Rows are computed in blocks, which stay in a core's cache from one product to the next. Each projection has a slot of
`in_blocks(rank)` columns of narrow; narrow and its gradient are kept as pairs of rows for the gradients of A and B.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit  # pyright: ignore[reportAttributeAccessIssue] - it comes by a star

from tinsmith.engine.cpu.pairs import (
    BLOCK,
    PANEL_LINE,
    even,
    in_blocks,
    in_panels,
    lay_columns,
    lay_rows,
    multiply_pairs,
)
from tinsmith.engine.cpu.primitives import atomic_next, c_function, pointer, void_pointer
from tinsmith.engine.cpu.rows import add_row
from tinsmith.engine.cpu.tiles import PAIR_COLUMNS, data_of, transpose_block

ADAPTER = np.dtype(
    [
        ("next", "i8"),  # part to compute next, which the threads count up from 0
        ("rows", "i8"),
        ("width", "i8"),  # of the input, a multiple of PAIR_COLUMNS
        ("rank", "i8"),  # a multiple of 8
        ("sites", "i8"),
        ("site_table", "i8"),  # address of SITE [sites]
        ("scale", "f8"),
        ("inputs", "i8"),  # address of bfloat16 [rows, width]
        ("input_line", "i8"),  # numbers from one row to the next
        ("input_grads", "i8"),
        ("input_grad_line", "i8"),
        ("narrow", "i8"),  # address of bfloat16 [rows / 2, line, 2], or 0
        ("narrow_grads", "i8"),
        ("line", "i8"),  # in_panels(sites * in_blocks(rank))
    ]
)
"""What the functions get a pointer to."""
SITE = np.dtype(
    [
        ("columns", "i8"),  # of the output, a multiple of PAIR_COLUMNS
        ("outputs", "i8"),  # address of bfloat16 [rows, columns], or of the gradients of these
        ("output_line", "i8"),
        ("a", "i8"),  # address of bfloat16 [rank, width]
        ("a_line", "i8"),
        ("b", "i8"),  # address of bfloat16 [columns, rank]
        ("b_line", "i8"),
        ("a_grads", "i8"),  # addresses of float32 of these shapes
        ("b_grads", "i8"),
    ]
)
"""A projection."""
BLOCK_ROWS = 64


@njit(inline="always")
def total_columns(sites: Any) -> Any:
    """Of the outputs of all sites."""
    total = 0
    for site in sites:
        total += site.columns
    return total


@cache
def forward_function() -> Any:
    """A C function of a pointer to an ADAPTER, which lives as long as this object: adds to the outputs, and fills
    narrow, unless it is 0."""

    @c_function
    def add(argument):
        call = carray(argument, 1, ADAPTER)[0]
        sites = carray(void_pointer(call.site_table), call.sites, SITE)
        width, rank, line, slot = call.width, call.rank, call.line, in_blocks(call.rank)
        inputs, kept, scale = pointer(call.inputs), pointer(call.narrow), np.float32(call.scale)
        a_panels, b_panels = np.zeros(line * width, np.uint16), np.empty(total_columns(sites) * rank, np.uint16)
        narrow = np.empty(BLOCK_ROWS * line, np.uint16)
        laid, at = 0, 0
        for number in range(call.sites):
            site = sites[number]
            lay_columns(data_of(a_panels), number * slot, pointer(site.a), 0, site.a_line, width, rank)
            for column in range(0, site.columns, PAIR_COLUMNS):
                lay_columns(data_of(b_panels), laid + column, pointer(site.b), column * site.b_line, site.b_line, rank,
                            PAIR_COLUMNS)  # fmt: skip
            laid += site.columns
        block = atomic_next(argument)
        while block * BLOCK_ROWS < call.rows:
            first = block * BLOCK_ROWS
            rows = min(BLOCK_ROWS, call.rows - first)
            for column in range(0, line, PAIR_COLUMNS):
                multiply_pairs(data_of(narrow), column, line, inputs, first * call.input_line, call.input_line, 2,
                               data_of(a_panels), column * width, PANEL_LINE, width, np.float32(1), rows,
                               False)  # fmt: skip
            at = 0
            for number in range(call.sites):
                site = sites[number]
                outputs, start = pointer(site.outputs), first * site.output_line
                for column in range(0, site.columns, PAIR_COLUMNS):
                    multiply_pairs(outputs, start + column, site.output_line, data_of(narrow), number * slot, line, 2,
                                   data_of(b_panels), (at + column) * rank, PANEL_LINE, rank, scale, rows,
                                   True)  # fmt: skip
                at += site.columns
            if call.narrow:
                lay_rows(kept, first * line, 2 * line, data_of(narrow), 0, line, rows, line)
            block = atomic_next(argument)

    return add


@cache
def backward_function() -> Any:
    """A C function of a pointer to an ADAPTER, which lives as long as this object: adds to the gradients of the inputs,
    and fills those of narrow, unless they are 0."""

    @c_function
    def add_backward(argument):
        call = carray(argument, 1, ADAPTER)[0]
        sites = carray(void_pointer(call.site_table), call.sites, SITE)
        width, rank, slot = call.width, call.rank, in_blocks(call.rank)
        depth, line, panel_columns = call.sites * slot, call.line + PAIR_COLUMNS, in_panels(rank)
        input_grads, kept, scale = pointer(call.input_grads), pointer(call.narrow_grads), np.float32(call.scale)
        a_panels, b_panels = (
            np.zeros(depth * width, np.uint16),
            np.zeros(total_columns(sites) * panel_columns, np.uint16),
        )
        narrow_grads = np.empty(BLOCK_ROWS * line, np.uint16)
        laid, at = 0, 0
        for number in range(call.sites):
            site = sites[number]
            for column in range(0, width, PAIR_COLUMNS):
                lay_rows(data_of(a_panels), column * depth + number * slot * PAIR_COLUMNS, PANEL_LINE, pointer(site.a),
                         column, site.a_line, rank, PAIR_COLUMNS)  # fmt: skip
            for column in range(0, rank, PAIR_COLUMNS):
                lay_rows(data_of(b_panels), laid + column * site.columns, PANEL_LINE, pointer(site.b), column,
                         site.b_line, site.columns, min(PAIR_COLUMNS, rank - column))  # fmt: skip
            laid += site.columns * panel_columns
        block = atomic_next(argument)
        while block * BLOCK_ROWS < call.rows:
            first = block * BLOCK_ROWS
            rows = min(BLOCK_ROWS, call.rows - first)
            at = 0
            for number in range(call.sites):
                site = sites[number]
                grads, start = pointer(site.outputs), first * site.output_line
                for column in range(0, rank, PAIR_COLUMNS):
                    multiply_pairs(data_of(narrow_grads), number * slot + column, line, grads, start, site.output_line,
                                   2, data_of(b_panels), at + column * site.columns, PANEL_LINE, site.columns,
                                   np.float32(1), rows, False)  # fmt: skip
                at += site.columns * panel_columns
            start = first * call.input_grad_line
            for column in range(0, width, PAIR_COLUMNS):
                multiply_pairs(input_grads, start + column, call.input_grad_line, data_of(narrow_grads), 0, line, 2,
                               data_of(a_panels), column * depth, PANEL_LINE, depth, scale, rows, True)  # fmt: skip
            if call.narrow_grads:
                lay_rows(kept, first * call.line, 2 * call.line, data_of(narrow_grads), 0, line, rows, depth)
            block = atomic_next(argument)

    return add_backward


@njit(inline="always")
def add_transposed(target: Any, start: Any, numbers: Any, scratch: Any, rank: Any) -> None:
    """Add numbers [in_blocks(rank), PAIR_COLUMNS], transposed, to target [PAIR_COLUMNS, rank]."""
    for row in range(in_blocks(rank) - BLOCK, -1, -BLOCK):  # what one writes beyond the rank, the next ones overwrite
        for column in range(0, PAIR_COLUMNS, BLOCK):
            transpose_block(scratch, column * rank + row, rank, numbers, row * PAIR_COLUMNS + column, PAIR_COLUMNS)
    add_row(target, start, scratch, 0, rank * PAIR_COLUMNS)


@cache
def gradient_function() -> Any:
    """A C function of a pointer to an ADAPTER, which lives as long as this object: adds to the gradients of A and B."""

    @c_function
    def add_gradients(argument):
        call = carray(argument, 1, ADAPTER)[0]
        sites = carray(void_pointer(call.site_table), call.sites, SITE)
        rows, width, rank, slot, line = call.rows, call.width, call.rank, in_blocks(call.rank), call.line
        inputs, scale, depth = pointer(call.inputs), np.float32(call.scale), even(call.rows)
        narrow, narrow_grads = pointer(call.narrow), pointer(call.narrow_grads)
        panel = np.empty(depth * PAIR_COLUMNS, np.uint16)
        sums, scratch = np.zeros(slot * PAIR_COLUMNS, np.float32), np.empty((slot + 1) * PAIR_COLUMNS, np.float32)
        columns = width + total_columns(sites)
        column = atomic_next(argument) * PAIR_COLUMNS
        while column < columns:
            if column < width:
                lay_rows(data_of(panel), 0, PANEL_LINE, inputs, column, call.input_line, rows, PAIR_COLUMNS)
                for number in range(call.sites):
                    a_grads = pointer(np.float64(sites[number].a_grads))
                    multiply_pairs(a_grads, column, width, narrow_grads, 2 * number * slot, 2, 2 * line, data_of(panel),
                                   0, PANEL_LINE, depth, scale, rank, True)  # fmt: skip
            else:
                own, number = column - width, 0
                while own >= sites[number].columns:
                    own -= sites[number].columns
                    number += 1
                site = sites[number]
                lay_rows(
                    data_of(panel), 0, PANEL_LINE, pointer(site.outputs), own, site.output_line, rows, PAIR_COLUMNS
                )
                multiply_pairs(data_of(sums), 0, PAIR_COLUMNS, narrow, 2 * number * slot, 2, 2 * line, data_of(panel),
                               0, PANEL_LINE, depth, scale, rank, False)  # fmt: skip
                add_transposed(pointer(np.float64(site.b_grads)), own * rank, data_of(sums), data_of(scratch), rank)
            column = atomic_next(argument) * PAIR_COLUMNS

    return add_gradients
