"""What adapters add to projections that share their input, and their gradients, as compiled functions in bfloat16.

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
    add_products,
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

CALL = np.dtype(
    [
        ("next", "i8"),  # part to compute next, which the threads count up from 0
        ("adapters", "i8"),
        ("adapter_table", "i8"),  # address of ADAPTER [adapters]
    ]
)
"""What the functions get a pointer to."""
ADAPTER = np.dtype(
    [
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
"""An adapter, and the rows that it serves."""
SITE = np.dtype(
    [
        ("columns", "i8"),  # of the output, a multiple of PAIR_COLUMNS
        ("outputs", "i8"),  # address of bfloat16 [rows, columns], or of the gradients of these
        ("output_line", "i8"),
        ("a", "i8"),  # address of bfloat16 [rank, width]
        ("a_line", "i8"),
        ("b", "i8"),  # address of bfloat16 [columns, rank]
        ("b_line", "i8"),
        ("a_grads", "i8"),  # addresses of float32 of these shapes, or 0
        ("b_grads", "i8"),
    ]
)
"""A projection."""
BLOCK_ROWS = 64


@njit(inline="always")
def total_columns(sites: Any) -> Any:
    """Columns of the outputs of all sites."""
    total = 0
    for site in sites:
        total += site.columns
    return total


@njit(inline="always")
def blocks_of(rows: Any) -> Any:
    """Blocks of so many rows."""
    return (rows + BLOCK_ROWS - 1) // BLOCK_ROWS


@njit(inline="always")
def lay_forward(a_panels: Any, b_panels: Any, adapter: Any, sites: Any) -> None:
    """Lay out A of all sites and B of each, transposed, as panels."""
    at, slot = 0, in_blocks(adapter.rank)
    for number in range(adapter.sites):
        site = sites[number]
        lay_columns(a_panels, number * slot, pointer(site.a), 0, site.a_line, adapter.width, adapter.rank)
        for column in range(0, site.columns, PAIR_COLUMNS):
            lay_columns(b_panels, at + column, pointer(site.b), column * site.b_line, site.b_line, adapter.rank,
                        PAIR_COLUMNS)  # fmt: skip
        at += site.columns


@njit(inline="always")
def forward_block(adapter: Any, sites: Any, a_panels: Any, b_panels: Any, narrow: Any, first: Any) -> None:
    """Narrow of a block of rows, and what it adds to the outputs."""
    rows, line, width, rank = min(BLOCK_ROWS, adapter.rows - first), adapter.line, adapter.width, adapter.rank
    for column in range(0, line, PAIR_COLUMNS):
        multiply_pairs(narrow, column, line, pointer(adapter.inputs), first * adapter.input_line, adapter.input_line, 2,
                       a_panels, column * width, PANEL_LINE, width, np.float32(1), rows)  # fmt: skip
    at = 0
    for number in range(adapter.sites):
        site = sites[number]
        outputs, start = pointer(site.outputs), first * site.output_line
        for column in range(0, site.columns, PAIR_COLUMNS):
            add_products(outputs, start + column, site.output_line, narrow, number * in_blocks(rank), line, 2, b_panels,
                         (at + column) * rank, PANEL_LINE, rank, np.float32(adapter.scale), rows)  # fmt: skip
        at += site.columns
    if adapter.narrow:
        lay_rows(pointer(adapter.narrow), first * line, 2 * line, narrow, 0, line, rows, line)


@cache
def forward_function() -> Any:
    """A C function of a pointer to a CALL, which lives as long as this object: adds to the outputs, and fills narrow,
    unless it is 0."""

    @c_function
    def add(argument):
        call, part, before = carray(argument, 1, CALL)[0], atomic_next(argument), 0
        for adapter in carray(void_pointer(call.adapter_table), call.adapters, ADAPTER):
            end = before + blocks_of(adapter.rows)
            if part < end:
                sites = carray(void_pointer(adapter.site_table), adapter.sites, SITE)
                a_panels = np.zeros(adapter.line * adapter.width, np.uint16)
                b_panels = np.empty(total_columns(sites) * adapter.rank, np.uint16)
                narrow = np.empty(BLOCK_ROWS * adapter.line, np.uint16)
                lay_forward(data_of(a_panels), data_of(b_panels), adapter, sites)
                while part < end:
                    first = (part - before) * BLOCK_ROWS
                    forward_block(adapter, sites, data_of(a_panels), data_of(b_panels), data_of(narrow), first)
                    part = atomic_next(argument)
            before = end

    return add


@njit(inline="always")
def lay_backward(a_panels: Any, b_panels: Any, adapter: Any, sites: Any) -> None:
    """Lay out A of all sites and B of each as panels."""
    at, slot, rank = 0, in_blocks(adapter.rank), adapter.rank
    for number in range(adapter.sites):
        site = sites[number]
        for column in range(0, adapter.width, PAIR_COLUMNS):
            lay_rows(a_panels, (column * adapter.sites + number * PAIR_COLUMNS) * slot, PANEL_LINE, pointer(site.a),
                     column, site.a_line, rank, PAIR_COLUMNS)  # fmt: skip
        for column in range(0, rank, PAIR_COLUMNS):
            lay_rows(b_panels, at + column * site.columns, PANEL_LINE, pointer(site.b), column, site.b_line,
                     site.columns, min(PAIR_COLUMNS, rank - column))  # fmt: skip
        at += site.columns * in_panels(rank)


@njit(inline="always")
def backward_block(adapter: Any, sites: Any, a_panels: Any, b_panels: Any, narrow_grads: Any, first: Any) -> None:
    """Gradients of narrow for a block of rows, and what these add to those of the inputs."""
    rows, slot, rank = min(BLOCK_ROWS, adapter.rows - first), in_blocks(adapter.rank), adapter.rank
    at, depth, line = 0, adapter.sites * slot, adapter.line + PAIR_COLUMNS
    for number in range(adapter.sites):
        site = sites[number]
        grads, start = pointer(site.outputs), first * site.output_line
        for column in range(0, rank, PAIR_COLUMNS):
            multiply_pairs(narrow_grads, number * slot + column, line, grads, start, site.output_line, 2, b_panels,
                           at + column * site.columns, PANEL_LINE, site.columns, np.float32(1), rows)  # fmt: skip
        at += site.columns * in_panels(rank)
    start = first * adapter.input_grad_line
    for column in range(0, adapter.width, PAIR_COLUMNS):
        add_products(pointer(adapter.input_grads), start + column, adapter.input_grad_line, narrow_grads, 0, line, 2,
                     a_panels, column * depth, PANEL_LINE, depth, np.float32(adapter.scale), rows)  # fmt: skip
    if adapter.narrow_grads:
        lay_rows(pointer(adapter.narrow_grads), first * adapter.line, 2 * adapter.line, narrow_grads, 0, line, rows,
                 depth)  # fmt: skip


@cache
def backward_function() -> Any:
    """A C function of a pointer to a CALL, which lives as long as this object: adds to the gradients of the inputs, and
    fills those of narrow, unless they are 0."""

    @c_function
    def add_backward(argument):
        call, part, before = carray(argument, 1, CALL)[0], atomic_next(argument), 0
        for adapter in carray(void_pointer(call.adapter_table), call.adapters, ADAPTER):
            end = before + blocks_of(adapter.rows)
            if part < end:
                sites = carray(void_pointer(adapter.site_table), adapter.sites, SITE)
                a_panels = np.zeros(adapter.sites * in_blocks(adapter.rank) * adapter.width, np.uint16)
                b_panels = np.zeros(total_columns(sites) * in_panels(adapter.rank), np.uint16)
                narrow_grads = np.empty(BLOCK_ROWS * (adapter.line + PAIR_COLUMNS), np.uint16)
                lay_backward(data_of(a_panels), data_of(b_panels), adapter, sites)
                while part < end:
                    first = (part - before) * BLOCK_ROWS
                    backward_block(adapter, sites, data_of(a_panels), data_of(b_panels), data_of(narrow_grads), first)
                    part = atomic_next(argument)
            before = end

    return add_backward


@njit(inline="always")
def add_transposed(target: Any, start: Any, numbers: Any, scratch: Any, rank: Any) -> None:
    """Add numbers [in_blocks(rank), PAIR_COLUMNS], transposed, to target [PAIR_COLUMNS, rank]."""
    for row in range(in_blocks(rank) - BLOCK, -1, -BLOCK):  # what one writes beyond the rank, the next ones overwrite
        for column in range(0, PAIR_COLUMNS, BLOCK):
            transpose_block(scratch, column * rank + row, rank, numbers, row * PAIR_COLUMNS + column, PAIR_COLUMNS)
    add_row(target, start, scratch, 0, rank * PAIR_COLUMNS)


@njit(inline="always")
def add_a_grads(adapter: Any, sites: Any, column: Any, panel: Any) -> None:
    """Add to PAIR_COLUMNS columns of the gradients of A of all sites."""
    slot, depth = in_blocks(adapter.rank), even(adapter.rows)
    lay_rows(panel, 0, PANEL_LINE, pointer(adapter.inputs), column, adapter.input_line, adapter.rows, PAIR_COLUMNS)
    for number in range(adapter.sites):
        add_products(pointer(np.float64(sites[number].a_grads)), column, adapter.width, pointer(adapter.narrow_grads),
                     2 * number * slot, 2, 2 * adapter.line, panel, 0, PANEL_LINE, depth, np.float32(adapter.scale),
                     adapter.rank)  # fmt: skip


@njit(inline="always")
def add_b_grads(adapter: Any, sites: Any, column: Any, panel: Any, sums: Any, scratch: Any) -> None:
    """Add to PAIR_COLUMNS rows of the gradients of B of a site: `column` counts those of all sites."""
    number, slot, rank, depth = 0, in_blocks(adapter.rank), adapter.rank, even(adapter.rows)
    while column >= sites[number].columns:
        column -= sites[number].columns
        number += 1
    site = sites[number]
    lay_rows(panel, 0, PANEL_LINE, pointer(site.outputs), column, site.output_line, adapter.rows, PAIR_COLUMNS)
    multiply_pairs(sums, 0, PAIR_COLUMNS, pointer(adapter.narrow), 2 * number * slot, 2, 2 * adapter.line, panel, 0,
                   PANEL_LINE, depth, np.float32(adapter.scale), rank)  # fmt: skip
    add_transposed(pointer(np.float64(site.b_grads)), column * rank, sums, scratch, rank)


@cache
def gradient_function() -> Any:
    """A C function of a pointer to a CALL, which lives as long as this object: adds to the gradients of A and B of the
    adapters that have some."""

    @c_function
    def add_gradients(argument):
        call, part, before = carray(argument, 1, CALL)[0], atomic_next(argument), 0
        for adapter in carray(void_pointer(call.adapter_table), call.adapters, ADAPTER):
            sites = carray(void_pointer(adapter.site_table), adapter.sites, SITE)
            columns = adapter.width + total_columns(sites) if sites[0].a_grads else 0
            end = before + columns // PAIR_COLUMNS
            if part < end:
                slot, panel = in_blocks(adapter.rank), np.empty(even(adapter.rows) * PAIR_COLUMNS, np.uint16)
                sums = np.zeros(slot * PAIR_COLUMNS, np.float32)
                scratch = np.empty((slot + 1) * PAIR_COLUMNS, np.float32)
                while part < end:
                    column = (part - before) * PAIR_COLUMNS
                    if column < adapter.width:
                        add_a_grads(adapter, sites, column, data_of(panel))
                    else:
                        add_b_grads(adapter, sites, column - adapter.width, data_of(panel), data_of(sums),
                                    data_of(scratch))  # fmt: skip
                    part = atomic_next(argument)
            before = end

    return add_gradients
