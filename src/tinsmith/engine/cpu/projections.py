"""Projections that share their input, with what adapters add, and their gradients, as compiled functions in bfloat16.

    output = W x + bias + s B narrow                           narrow = A x
    input grad = W^T output grad + s A^T narrow grad           narrow grad = B^T output grad
    A grad += s narrow grad x^T                                B grad += s output grad narrow^T

Weights are laid out once as panels (`pairs`), forward and transposed. A block of rows stays in a core's cache while it
is multiplied with one panel after the other, and sums are rounded once. Without weights, what adapters add is added to
outputs that are there already. Each projection has a slot of `in_blocks(rank)` columns of narrow.
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
from tinsmith.engine.cpu.primitives import atomic_next, c_function, compiled, pointer, void_pointer
from tinsmith.engine.cpu.rows import add_row, copy_row
from tinsmith.engine.cpu.tiles import PAIR_COLUMNS, data_of, transpose_block

CALL = np.dtype(
    [
        ("next", "i8"),  # part to compute next, which the threads count up from 0
        ("rows", "i8"),
        ("block", "i8"),  # rows of a block, at most
        ("blocks", "i8"),
        ("block_table", "i8"),  # address of BLOCK_OF_ROWS [blocks]; 0: blocks follow each other, of the first matrix
        ("panels", "i8"),  # that a thread computes at a time
        ("width", "i8"),  # of the input, a multiple of PAIR_COLUMNS
        ("inputs", "i8"),  # address of bfloat16 [rows, width], or of their gradients
        ("input_line", "i8"),  # numbers from one row to the next
        ("adds", "i8"),  # whether gradients of the inputs are added to those that are there
        ("sites", "i8"),
        ("site_table", "i8"),  # address of SITE [sites]
        ("adapters", "i8"),
        ("adapter_table", "i8"),  # address of ADAPTER [adapters], by rows
        ("rank", "i8"),  # the highest of the adapters
    ]
)
"""What the functions get a pointer to."""
BLOCK_OF_ROWS = np.dtype([("start", "i8"), ("stop", "i8"), ("matrix", "i8")])
"""Rows, and the number of the matrix that they are multiplied with, where a projection has one for each expert."""
SITE = np.dtype(
    [
        ("columns", "i8"),  # of the output, a multiple of PAIR_COLUMNS
        ("weights", "i8"),  # address of bfloat16 panels of each W^T, for gradients of the inputs of W; or 0
        ("bias", "i8"),  # address of bfloat16 [columns], or 0
        ("outputs", "i8"),  # address of bfloat16 [rows, columns], or of the gradients of these
        ("output_line", "i8"),
    ]
)
"""A projection."""
ADAPTER = np.dtype(
    [
        ("start", "i8"),  # its rows
        ("stop", "i8"),
        ("rank", "i8"),  # a multiple of 8
        ("scale", "f8"),
        ("pair_table", "i8"),  # address of PAIR [sites]
        ("narrow", "i8"),  # address of bfloat16 [stop - start, line_of(sites, rank)], or 0
        ("narrow_grads", "i8"),
    ]
)
"""An adapter, and the rows that it serves."""
PAIR = np.dtype(
    [
        ("a", "i8"),  # address of bfloat16 [rank, width]
        ("a_line", "i8"),
        ("b", "i8"),  # address of bfloat16 [columns, rank]
        ("b_line", "i8"),
        ("a_grads", "i8"),  # addresses of float32 of these shapes, or 0 of what is not trained here
        ("b_grads", "i8"),
    ]
)
"""An adapter's matrices of a projection."""
PART_COLUMNS = 4 * PAIR_COLUMNS
"""Columns of an adapter's gradients that a thread computes at a time: it should read some of memory at a place."""


@njit(inline="always")
def line_of(sites: Any, rank: Any) -> Any:
    """Numbers of a row of narrow."""
    return in_panels(sites * in_blocks(rank))


@njit(inline="always")
def total_columns(sites: Any) -> Any:
    """Columns of the outputs of all sites."""
    total = 0
    for site in sites:
        total += site.columns
    return total


@njit(inline="always")
def most_columns(sites: Any) -> Any:
    """Columns of the widest output."""
    most = 0
    for site in sites:
        most = max(most, site.columns)
    return most


@njit(inline="always")
def rows_of(call: Any, number: Any) -> Any:
    """The first row of a block, the one after its last, and the number of their matrix."""
    if call.block_table:
        block = carray(void_pointer(call.block_table), call.blocks, BLOCK_OF_ROWS)[number]
        return block.start, block.stop, block.matrix
    return number * call.block, min((number + 1) * call.block, call.rows), np.int64(0)


@njit(error_model="numpy")
def within(adapters: Any, first: Any, last: Any) -> Any:
    """The number of the first adapter with rows of first..last, and the one after the last with some."""
    own = 0
    while own < len(adapters) and adapters[own].stop <= first:
        own += 1
    end = own
    while end < len(adapters) and adapters[end].start < last:
        end += 1
    return own, end


@njit(inline="always")
def pairs_of(adapter: Any, sites: Any) -> Any:
    """The adapter's matrices."""
    return carray(void_pointer(adapter.pair_table), len(sites), PAIR)


@njit(error_model="numpy")
def keep_rows(target: Any, place: Any, line: Any, narrow: Any, start: Any, stride: Any, rows: Any) -> None:
    """Copy rows of narrow to memory."""
    for row in range(rows):
        for column in range(line):
            target[place + row * line + column] = narrow[start + row * stride + column]


@njit(error_model="numpy")
def widen_rows(sums: Any, numbers: Any, start: Any, line: Any, rows: Any) -> None:
    """Read rows of a panel's columns."""
    for row in range(rows):
        copy_row(sums, row * PAIR_COLUMNS, numbers, start + row * line, np.float32(1), PAIR_COLUMNS)


@njit(error_model="numpy")
def round_rows(numbers: Any, start: Any, line: Any, sums: Any, rows: Any) -> None:
    """Write rows of a panel's columns."""
    for row in range(rows):
        copy_row(numbers, start + row * line, sums, row * PAIR_COLUMNS, np.float32(1), PAIR_COLUMNS)


@njit(error_model="numpy")
def fill_narrow(call, sites, adapter, panels, narrow, stride, first, low, high, keeps):  # type: ignore[no-untyped-def]
    """Narrow of an adapter's rows low..high, in a block that begins with row `first`."""
    pairs, slot, line = pairs_of(adapter, sites), in_blocks(adapter.rank), line_of(len(sites), adapter.rank)
    start, width = (low - first) * stride, call.width
    for number in range(len(sites)):
        pair = pairs[number]
        lay_columns(panels, number * slot, pointer(pair.a), 0, pair.a_line, width, adapter.rank)
    for column in range(0, line, PAIR_COLUMNS):  # what is beyond the last slot is not read
        multiply_pairs(narrow, start + column, stride, pointer(call.inputs), low * call.input_line, call.input_line, 2,
                       panels, column * width, PANEL_LINE, width, np.float32(1), high - low, 0)  # fmt: skip
    if keeps and adapter.narrow:
        keep_rows(pointer(adapter.narrow), (low - adapter.start) * line, line, narrow, start, stride, high - low)


@njit(error_model="numpy")
def start_sums(call, site, sums, column, first, rows, matrix):  # type: ignore[no-untyped-def]
    """W x + bias in a panel's columns; the outputs that are there without weights."""
    if not site.weights:
        widen_rows(sums, pointer(site.outputs), first * site.output_line + column, site.output_line, rows)
        return
    if site.bias:
        widen_rows(sums, pointer(site.bias), column, np.int64(0), rows)
    multiply_pairs(sums, 0, PAIR_COLUMNS, pointer(call.inputs), first * call.input_line, call.input_line, 2,
                   pointer(site.weights), (matrix * site.columns + column) * call.width, PANEL_LINE, call.width,
                   np.float32(1), rows, site.bias != 0)  # fmt: skip


@cache
def forward_function() -> Any:
    """A C function of a pointer to a CALL, which lives as long as this object: fills the outputs, or adds to them
    without weights, and fills narrow, unless it is 0."""

    @c_function
    def fill_outputs(argument):
        call = carray(argument, 1, CALL)[0]
        sites = carray(void_pointer(call.site_table), call.sites, SITE)
        adapters = carray(void_pointer(call.adapter_table), call.adapters, ADAPTER)
        stride = line_of(call.sites, call.rank)
        sums = np.empty(call.block * PAIR_COLUMNS, np.float32)
        narrow = np.empty(call.block * stride, np.uint16)
        a_panels, b_panel = np.empty(stride * call.width, np.uint16), np.empty(call.rank * PAIR_COLUMNS, np.uint16)
        panels = total_columns(sites) // PAIR_COLUMNS
        groups, prepared = (panels + call.panels - 1) // call.panels, -1
        part = atomic_next(argument)
        while part < groups * call.blocks:
            (first, last, matrix), group = rows_of(call, part // groups), part % groups
            own, end = within(adapters, first, last)
            if prepared != first:
                prepared = first
                for number in range(own, end):
                    adapter = adapters[number]
                    fill_narrow(call, sites, adapter, data_of(a_panels), data_of(narrow), stride, first,
                                max(first, adapter.start), min(last, adapter.stop), group == 0)  # fmt: skip
            number, column = 0, group * call.panels * PAIR_COLUMNS
            for _ in range(min(call.panels, panels - group * call.panels)):
                while column >= sites[number].columns:
                    column -= sites[number].columns
                    number += 1
                site = sites[number]
                start_sums(call, site, data_of(sums), column, first, last - first, matrix)
                for at in range(own, end):
                    adapter = adapters[at]
                    pair = pairs_of(adapter, sites)[number]
                    low, high, rank = max(first, adapter.start), min(last, adapter.stop), adapter.rank
                    lay_columns(data_of(b_panel), 0, pointer(pair.b), column * pair.b_line, pair.b_line, rank,
                                PAIR_COLUMNS)  # fmt: skip
                    multiply_pairs(data_of(sums), (low - first) * PAIR_COLUMNS, PAIR_COLUMNS, data_of(narrow),
                                   (low - first) * stride + number * in_blocks(rank), stride, 2, data_of(b_panel), 0,
                                   PANEL_LINE, rank, np.float32(adapter.scale), high - low, 1)  # fmt: skip
                round_rows(pointer(site.outputs), first * site.output_line + column, site.output_line, data_of(sums),
                           last - first)  # fmt: skip
                column += PAIR_COLUMNS
            part = atomic_next(argument)

    return fill_outputs


@njit(error_model="numpy")
def lay_zeros(panel: Any, first: Any, last: Any) -> None:
    """Zeros from a pair to another one of a panel."""
    for i in range(first * PANEL_LINE, last * PANEL_LINE):
        panel[i] = 0


@njit(error_model="numpy")
def fill_narrow_grads(sites, adapter, panel, narrow_grads, stride, first, low, high, keeps):  # type: ignore[no-untyped-def]
    """Gradients of narrow of an adapter's rows low..high, in a block that begins with row `first`."""
    pairs, rank, start = pairs_of(adapter, sites), adapter.rank, (low - first) * stride
    slot, line = in_blocks(rank), line_of(len(sites), rank)
    for number in range(len(sites)):
        site, pair = sites[number], pairs[number]
        for column in range(0, rank, PAIR_COLUMNS):  # what one writes beyond its slot, the next ones overwrite
            if rank - column < PAIR_COLUMNS:
                lay_zeros(panel, 0, site.columns // 2)
            lay_rows(panel, 0, PANEL_LINE, pointer(pair.b), column, pair.b_line, site.columns,
                     min(PAIR_COLUMNS, rank - column))  # fmt: skip
            multiply_pairs(narrow_grads, start + number * slot + column, stride, pointer(site.outputs),
                           low * site.output_line, site.output_line, 2, panel, 0, PANEL_LINE, site.columns,
                           np.float32(1), high - low, 0)  # fmt: skip
    if keeps and adapter.narrow_grads:
        keep_rows(pointer(adapter.narrow_grads), (low - adapter.start) * line, line, narrow_grads, start, stride,
                  high - low)  # fmt: skip


@njit(error_model="numpy")
def start_grads(call, sites, sums, column, first, rows, matrix):  # type: ignore[no-untyped-def]
    """W^T output grad of all sites in a panel's columns, with the gradients that are there."""
    added = call.adds
    if added:
        widen_rows(sums, pointer(call.inputs), first * call.input_line + column, call.input_line, rows)
    for site in sites:
        if not site.weights:
            continue
        multiply_pairs(sums, 0, PAIR_COLUMNS, pointer(site.outputs), first * site.output_line, site.output_line, 2,
                       pointer(site.weights), (matrix * call.width + column) * site.columns, PANEL_LINE, site.columns,
                       np.float32(1), rows, added)  # fmt: skip
        added = 1


@cache
def backward_function() -> Any:
    """A C function of a pointer to a CALL, which lives as long as this object: fills the gradients of the inputs, or
    adds to them, and fills those of narrow, unless they are 0."""

    @c_function
    def fill_input_grads(argument):
        call = carray(argument, 1, CALL)[0]
        sites = carray(void_pointer(call.site_table), call.sites, SITE)
        adapters = carray(void_pointer(call.adapter_table), call.adapters, ADAPTER)
        stride = line_of(call.sites, call.rank) + PAIR_COLUMNS
        sums = np.empty(call.block * PAIR_COLUMNS, np.float32)
        narrow_grads = np.empty(call.block * stride, np.uint16)
        b_panel = np.empty(most_columns(sites) * PAIR_COLUMNS if call.adapters else 0, np.uint16)
        a_panel = np.empty(call.sites * in_blocks(call.rank) * PAIR_COLUMNS, np.uint16)
        panels = call.width // PAIR_COLUMNS
        groups, prepared = (panels + call.panels - 1) // call.panels, -1
        part = atomic_next(argument)
        while part < groups * call.blocks:
            (first, last, matrix), group = rows_of(call, part // groups), part % groups
            own, end = within(adapters, first, last)
            if prepared != first:
                prepared = first
                for number in range(own, end):
                    adapter = adapters[number]
                    fill_narrow_grads(sites, adapter, data_of(b_panel), data_of(narrow_grads), stride, first,
                                      max(first, adapter.start), min(last, adapter.stop), group == 0)  # fmt: skip
            for panel in range(group * call.panels, min((group + 1) * call.panels, panels)):
                column = panel * PAIR_COLUMNS
                start_grads(call, sites, data_of(sums), column, first, last - first, matrix)
                for at in range(own, end):
                    adapter = adapters[at]
                    pairs, rank, slot = pairs_of(adapter, sites), adapter.rank, in_blocks(adapter.rank)
                    low, high = max(first, adapter.start), min(last, adapter.stop)
                    for number in range(call.sites):
                        pair = pairs[number]
                        lay_rows(data_of(a_panel), number * slot * PAIR_COLUMNS, PANEL_LINE, pointer(pair.a), column,
                                 pair.a_line, rank, PAIR_COLUMNS)  # fmt: skip
                        lay_zeros(data_of(a_panel), (number * slot + rank) // 2, (number + 1) * slot // 2)
                    multiply_pairs(data_of(sums), (low - first) * PAIR_COLUMNS, PAIR_COLUMNS, data_of(narrow_grads),
                                   (low - first) * stride, stride, 2, data_of(a_panel), 0, PANEL_LINE,
                                   call.sites * slot, np.float32(adapter.scale), high - low, 1)  # fmt: skip
                round_rows(pointer(call.inputs), first * call.input_line + column, call.input_line, data_of(sums),
                           last - first)  # fmt: skip
            part = atomic_next(argument)

    return fill_input_grads


@njit(error_model="numpy")
def add_transposed(target: Any, start: Any, numbers: Any, scratch: Any, rank: Any) -> None:
    """Add numbers [in_blocks(rank), PAIR_COLUMNS], transposed, to target [PAIR_COLUMNS, rank]."""
    for row in range(in_blocks(rank) - BLOCK, -1, -BLOCK):  # what one writes beyond the rank, the next ones overwrite
        for column in range(0, PAIR_COLUMNS, BLOCK):
            transpose_block(scratch, column * rank + row, rank, numbers, row * PAIR_COLUMNS + column, PAIR_COLUMNS)
    add_row(target, start, scratch, 0, rank * PAIR_COLUMNS)


@njit(error_model="numpy")
def add_a_grads(call, sites, adapter, column, columns, narrow_grads, panel):  # type: ignore[no-untyped-def]
    """Add to some columns of the gradients of A of all sites; narrow_grads in pairs of rows."""
    rows, rank, line = adapter.stop - adapter.start, adapter.rank, line_of(call.sites, adapter.rank)
    pairs = pairs_of(adapter, sites)
    if not pairs[0].a_grads:
        return
    lay_rows(panel, 0, 2 * columns, pointer(call.inputs), adapter.start * call.input_line + column, call.input_line,
             rows, columns)  # fmt: skip
    for number in range(call.sites):
        for own in range(0, columns, PAIR_COLUMNS):
            multiply_pairs(pointer(np.float64(pairs[number].a_grads)), column + own, call.width, narrow_grads,
                           2 * number * in_blocks(rank), 2, 2 * line, panel, 2 * own, 2 * columns, even(rows),
                           np.float32(adapter.scale), rank, 1)  # fmt: skip


@njit(error_model="numpy")
def add_b_grads(call, sites, adapter, number, column, columns, narrow, panel, sums, scratch):  # type: ignore[no-untyped-def]
    """Add to some rows of the gradients of B of a site; narrow in pairs of rows."""
    rows, rank, line = adapter.stop - adapter.start, adapter.rank, line_of(call.sites, adapter.rank)
    site, grads = sites[number], pairs_of(adapter, sites)[number].b_grads
    if not grads:
        return
    lay_rows(panel, 0, 2 * columns, pointer(site.outputs), adapter.start * site.output_line + column, site.output_line,
             rows, columns)  # fmt: skip
    for own in range(0, columns, PAIR_COLUMNS):
        multiply_pairs(sums, 0, PAIR_COLUMNS, narrow, 2 * number * in_blocks(rank), 2, 2 * line, panel, 2 * own,
                       2 * columns, even(rows), np.float32(adapter.scale), rank, 0)  # fmt: skip
        add_transposed(pointer(np.float64(grads)), (column + own) * rank, sums, scratch, rank)


@njit(inline="always")
def parts_of(columns: Any) -> Any:
    """Parts of so many columns."""
    return (columns + PART_COLUMNS - 1) // PART_COLUMNS


@cache
def gradient_function() -> Any:
    """A C function of a pointer to a CALL, which lives as long as this object: adds to the gradients of A and B of the
    adapters that have some."""

    @c_function
    def add_gradients(argument):
        call, part, before = carray(argument, 1, CALL)[0], atomic_next(argument), 0
        sites, of_inputs = carray(void_pointer(call.site_table), call.sites, SITE), parts_of(call.width)
        parts = of_inputs
        for site in sites:
            parts += parts_of(site.columns)
        for adapter in carray(void_pointer(call.adapter_table), call.adapters, ADAPTER):
            pair = pairs_of(adapter, sites)[0]
            end = before + (parts if pair.a_grads or pair.b_grads else 0)
            if part < end:
                depth, slot = even(adapter.stop - adapter.start), in_blocks(adapter.rank)
                line, rows = line_of(call.sites, adapter.rank), adapter.stop - adapter.start
                panel, sums = np.empty(depth * PART_COLUMNS, np.uint16), np.zeros(slot * PAIR_COLUMNS, np.float32)
                scratch = np.empty((slot + 1) * PAIR_COLUMNS, np.float32)
                narrow, narrow_grads = np.empty(depth * line, np.uint16), np.empty(depth * line, np.uint16)
                lay_rows(data_of(narrow), 0, 2 * line, pointer(adapter.narrow), 0, line, rows, line)
                lay_rows(data_of(narrow_grads), 0, 2 * line, pointer(adapter.narrow_grads), 0, line, rows, line)
                while part < end:
                    own, number = part - before, 0
                    if own < of_inputs:
                        column = own * PART_COLUMNS
                        add_a_grads(call, sites, adapter, column, min(PART_COLUMNS, call.width - column),
                                    data_of(narrow_grads), data_of(panel))  # fmt: skip
                    else:
                        own -= of_inputs
                        while own >= parts_of(sites[number].columns):
                            own -= parts_of(sites[number].columns)
                            number += 1
                        column = own * PART_COLUMNS
                        add_b_grads(call, sites, adapter, number, column,
                                    min(PART_COLUMNS, sites[number].columns - column), data_of(narrow), data_of(panel),
                                    data_of(sums), data_of(scratch))  # fmt: skip
                    part = atomic_next(argument)
            before = end

    return add_gradients


@compiled
def lay_weights(panels, weights, stride, depth, columns):
    """Panels [columns / PAIR_COLUMNS, depth / 2, PAIR_COLUMNS, 2] of W [columns, depth]; at addresses."""
    lay_columns(pointer(panels), 0, pointer(weights), 0, stride, depth, columns)


@compiled
def lay_transposed(panels, weights, stride, depth, columns):
    """The same of W^T, with W [depth, columns]."""
    for column in range(0, columns, PAIR_COLUMNS):
        lay_rows(pointer(panels), column * depth, PANEL_LINE, pointer(weights), column, stride, depth, PAIR_COLUMNS)


def compile_layouts() -> None:
    """Compile what lays weights out."""
    for function in (lay_weights, lay_transposed):
        function(0, 0, 0, 0, 0)
