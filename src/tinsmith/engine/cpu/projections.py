"""Projections that share their input, with what adapters add, and their gradients, as compiled functions.

    output = W x + bias + s B narrow                           narrow = A x
    input grad = W^T output grad + s A^T narrow grad           narrow grad = B^T output grad
    A grad += s narrow grad x^T                                B grad += s output grad narrow^T

Numbers are float32, or bfloat16 that are multiplied in pairs. Weights are laid out once as `panels`, forward and
transposed: those of float32 projections as bfloat16 or float16 numbers if these represent them. A block of rows stays
in a core's cache while it is multiplied with one panel after the other, and sums are rounded once. Without weights,
what adapters add is added to outputs that are there already. Each projection has a slot of `in_blocks(rank)` columns of
narrow.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit  # pyright: ignore[reportAttributeAccessIssue] - it comes by a star

from tinsmith.engine.cpu.panels import (
    BFLOAT16,
    BLOCK,
    even,
    in_blocks,
    in_panels,
    lay_columns,
    lay_rows,
    multiply,
    multiply_transposed,
    multiply_weights,
)
from tinsmith.engine.cpu.primitives import (
    atomic_next,
    c_function,
    compiled,
    half_pointer,
    numbers_of,
    pointer,
    pointer_like,
    void_pointer,
)
from tinsmith.engine.cpu.rows import add_row, copy_row, fill
from tinsmith.engine.cpu.tiles import (
    TILE_COLUMNS,
    data_of,
    pack_line,
    release_amx,
    set_up_amx,
    transpose_rows,
    widen_line,
)
from tinsmith.engine.cpu.vectors import LANES

CALL = np.dtype(
    [
        ("next", "i8"),  # part to compute next, which the threads count up from 0
        ("rows", "i8"),
        ("block", "i8"),  # rows of a block, at most
        ("blocks", "i8"),
        ("block_table", "i8"),  # address of BLOCK_OF_ROWS [blocks]; 0: blocks follow each other, of the first matrix
        ("panels", "i8"),  # that a thread computes at a time
        ("width", "i8"),  # of the input, a multiple of TILE_COLUMNS
        ("inputs", "i8"),  # address of [rows, width], or of their gradients
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
        ("columns", "i8"),  # of the output, a multiple of TILE_COLUMNS
        ("weights", "i8"),  # address of panels of each W^T, for gradients of the inputs of W; or 0
        ("storage", "i8"),  # what these are: `panels.AS_FACTORS`, BFLOAT16 or FLOAT16
        ("bias", "i8"),  # address of [columns], or 0
        ("outputs", "i8"),  # address of [rows, columns], or of the gradients of these
        ("output_line", "i8"),
    ]
)
"""A projection."""
ADAPTER = np.dtype(
    [
        ("start", "i8"),  # its rows
        ("stop", "i8"),
        ("rank", "i8"),  # of bfloat16 a multiple of 8
        ("scale", "f8"),
        ("a_panels", "i8"),  # address of panels [width, line_of(sites, rank)] of A^T of all sites, or 0
        ("pair_table", "i8"),  # address of PAIR [sites]
        ("narrow", "i8"),  # address of [stop - start, line_of(sites, rank)], or 0
        ("narrow_grads", "i8"),
    ]
)
"""An adapter, and the rows that it serves."""
PAIR = np.dtype(
    [
        ("a", "i8"),  # address of [rank, width]
        ("a_line", "i8"),
        ("b", "i8"),  # address of [columns, rank]
        ("b_line", "i8"),
        ("b_panels", "i8"),  # address of panels [rank, columns] of B^T, or 0
        ("a_grads", "i8"),  # addresses of float32 of these shapes, or 0 of what is not trained here
        ("b_grads", "i8"),
    ]
)
"""An adapter's matrices of a projection."""
SQUARE = TILE_COLUMNS * TILE_COLUMNS
"""Numbers of a square of a matrix, which are side by side in panels of it and in panels of the transposed one."""
PART_COLUMNS = 4 * TILE_COLUMNS
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
        copy_row(sums, row * TILE_COLUMNS, numbers, start + row * line, np.float32(1), TILE_COLUMNS)


@njit(error_model="numpy")
def round_rows(numbers: Any, start: Any, line: Any, sums: Any, rows: Any) -> None:
    """Write rows of a panel's columns."""
    for row in range(rows):
        copy_row(numbers, start + row * line, sums, row * TILE_COLUMNS, np.float32(1), TILE_COLUMNS)


@njit(inline="always")
def fill_narrow(call, sites, adapter, room, narrow, stride, first, low, high, keeps):  # type: ignore[no-untyped-def]
    """Narrow of an adapter's rows low..high, in a block that begins with row `first`. There is room for A in panels."""
    pairs, slot, line = pairs_of(adapter, sites), in_blocks(adapter.rank), line_of(len(sites), adapter.rank)
    start, width, inputs = (low - first) * stride, call.width, pointer_like(narrow, call.inputs)
    panels = room
    if adapter.a_panels:
        panels = pointer_like(narrow, adapter.a_panels)
    else:
        for number in range(len(sites)):
            pair = pairs[number]
            lay_columns(panels, number * slot, pointer_like(narrow, pair.a), 0, pair.a_line, width, adapter.rank)
    for column in range(0, line, TILE_COLUMNS):  # what is beyond the last slot is not read
        multiply(narrow, start + column, stride, inputs, low * call.input_line, call.input_line, panels, column * width,
                 width, np.float32(1), high - low, 0)  # fmt: skip
    if keeps and adapter.narrow:
        target = pointer_like(narrow, adapter.narrow)
        keep_rows(target, (low - adapter.start) * line, line, narrow, start, stride, high - low)


@njit(inline="always")
def start_sums(call, site, sums, like, column, first, rows, matrix):  # type: ignore[no-untyped-def]
    """W x + bias in a panel's columns; the outputs that are there without weights."""
    if not site.weights:
        outputs = pointer_like(like, site.outputs)
        widen_rows(sums, outputs, first * site.output_line + column, site.output_line, rows)
        return
    if site.bias:
        widen_rows(sums, pointer_like(like, site.bias), column, np.int64(0), rows)
    multiply_weights(sums, 0, TILE_COLUMNS, pointer_like(like, call.inputs), first * call.input_line, call.input_line,
                     site.weights, site.storage, (matrix * site.columns + column) * call.width, call.width, rows,
                     site.bias != 0)  # fmt: skip


@cache
def forward_function(kind: str) -> Any:
    """A C function of a pointer to a CALL, which lives as long as this object: fills the outputs, or adds to them
    without weights, and fills narrow, unless it is 0."""
    _, dtype = numbers_of(kind)

    @c_function
    def fill_outputs(argument):
        set_up_amx(dtype)
        call = carray(argument, 1, CALL)[0]
        sites = carray(void_pointer(call.site_table), call.sites, SITE)
        adapters = carray(void_pointer(call.adapter_table), call.adapters, ADAPTER)
        stride = line_of(call.sites, call.rank)
        sums = np.empty(call.block * TILE_COLUMNS, np.float32)
        narrow = np.empty(call.block * stride, dtype)
        a_panels, b_panel = np.empty(stride * call.width, dtype), np.empty(call.rank * TILE_COLUMNS, dtype)
        panels = total_columns(sites) // TILE_COLUMNS
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
            number, column = 0, group * call.panels * TILE_COLUMNS
            for _ in range(min(call.panels, panels - group * call.panels)):
                while column >= sites[number].columns:
                    column -= sites[number].columns
                    number += 1
                site = sites[number]
                start_sums(call, site, data_of(sums), data_of(narrow), column, first, last - first, matrix)
                for at in range(own, end):
                    adapter = adapters[at]
                    pair = pairs_of(adapter, sites)[number]
                    low, high, rank = max(first, adapter.start), min(last, adapter.stop), adapter.rank
                    panel, start = data_of(b_panel), 0
                    if pair.b_panels:
                        panel, start = pointer_like(data_of(narrow), pair.b_panels), column * rank
                    else:
                        lay_columns(panel, 0, pointer_like(data_of(narrow), pair.b), column * pair.b_line, pair.b_line,
                                    rank, TILE_COLUMNS)  # fmt: skip
                    multiply(data_of(sums), (low - first) * TILE_COLUMNS, TILE_COLUMNS, data_of(narrow),
                             (low - first) * stride + number * in_blocks(rank), stride, panel, start, rank,
                             np.float32(adapter.scale), high - low, 1)  # fmt: skip
                round_rows(pointer_like(data_of(narrow), site.outputs), first * site.output_line + column,
                           site.output_line, data_of(sums), last - first)  # fmt: skip
                column += TILE_COLUMNS
            part = atomic_next(argument)
        release_amx(dtype)

    return fill_outputs


@njit(error_model="numpy")
def lay_zeros(panel: Any, first: Any, last: Any) -> None:
    """Zeros in a panel from an even number of its depth to another one."""
    fill(panel, first * TILE_COLUMNS, last * TILE_COLUMNS, np.float32(0))


@njit(inline="always")
def fill_narrow_grads(sites, adapter, panel, narrow_grads, stride, first, low, high, keeps):  # type: ignore[no-untyped-def]
    """Gradients of narrow of an adapter's rows low..high, in a block that begins with row `first`."""
    pairs, rank, start = pairs_of(adapter, sites), adapter.rank, (low - first) * stride
    slot, line = in_blocks(rank), line_of(len(sites), rank)
    for number in range(len(sites)):
        site, pair = sites[number], pairs[number]
        for column in range(0, rank, TILE_COLUMNS):  # what one writes beyond its slot, the next ones overwrite
            if rank - column < TILE_COLUMNS:
                lay_zeros(panel, 0, site.columns)
            lay_rows(panel, 0, TILE_COLUMNS, pointer_like(panel, pair.b), column, pair.b_line, site.columns,
                     min(TILE_COLUMNS, rank - column))  # fmt: skip
            multiply(narrow_grads, start + number * slot + column, stride, pointer_like(panel, site.outputs),
                     low * site.output_line, site.output_line, panel, 0, site.columns, np.float32(1), high - low,
                     0)  # fmt: skip
    if keeps and adapter.narrow_grads:
        target = pointer_like(panel, adapter.narrow_grads)
        keep_rows(target, (low - adapter.start) * line, line, narrow_grads, start, stride, high - low)


@njit(inline="always")
def start_grads(call, sites, sums, like, column, first, rows, matrix):  # type: ignore[no-untyped-def]
    """W^T output grad of all sites in a panel's columns, with the gradients that are there."""
    added = call.adds
    if added:
        inputs = pointer_like(like, call.inputs)
        widen_rows(sums, inputs, first * call.input_line + column, call.input_line, rows)
    for site in sites:
        if not site.weights:
            continue
        multiply_weights(sums, 0, TILE_COLUMNS, pointer_like(like, site.outputs), first * site.output_line,
                         site.output_line, site.weights, site.storage, (matrix * call.width + column) * site.columns,
                         site.columns, rows, added)  # fmt: skip
        added = 1


@cache
def backward_function(kind: str) -> Any:
    """A C function of a pointer to a CALL, which lives as long as this object: fills the gradients of the inputs, or
    adds to them, and fills those of narrow, unless they are 0."""
    _, dtype = numbers_of(kind)

    @c_function
    def fill_input_grads(argument):
        set_up_amx(dtype)
        call = carray(argument, 1, CALL)[0]
        sites = carray(void_pointer(call.site_table), call.sites, SITE)
        adapters = carray(void_pointer(call.adapter_table), call.adapters, ADAPTER)
        stride = line_of(call.sites, call.rank) + TILE_COLUMNS
        sums = np.empty(call.block * TILE_COLUMNS, np.float32)
        narrow_grads = np.empty(call.block * stride, dtype)
        b_panel = np.empty(most_columns(sites) * TILE_COLUMNS if call.adapters else 0, dtype)
        a_panel = np.empty(call.sites * in_blocks(call.rank) * TILE_COLUMNS, dtype)
        panels = call.width // TILE_COLUMNS
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
                column = panel * TILE_COLUMNS
                start_grads(call, sites, data_of(sums), data_of(a_panel), column, first, last - first, matrix)
                for at in range(own, end):
                    adapter = adapters[at]
                    pairs, rank, slot = pairs_of(adapter, sites), adapter.rank, in_blocks(adapter.rank)
                    low, high = max(first, adapter.start), min(last, adapter.stop)
                    for number in range(call.sites):
                        pair = pairs[number]
                        lay_rows(data_of(a_panel), number * slot * TILE_COLUMNS, TILE_COLUMNS,
                                 pointer_like(data_of(a_panel), pair.a), column, pair.a_line, rank,
                                 TILE_COLUMNS)  # fmt: skip
                        lay_zeros(data_of(a_panel), number * slot + even(rank), (number + 1) * slot)
                    multiply(data_of(sums), (low - first) * TILE_COLUMNS, TILE_COLUMNS, data_of(narrow_grads),
                             (low - first) * stride, stride, data_of(a_panel), 0, call.sites * slot,
                             np.float32(adapter.scale), high - low, 1)  # fmt: skip
                round_rows(pointer_like(data_of(a_panel), call.inputs), first * call.input_line + column,
                           call.input_line, data_of(sums), last - first)  # fmt: skip
            part = atomic_next(argument)
        release_amx(dtype)

    return fill_input_grads


@njit(error_model="numpy")
def add_transposed(target: Any, start: Any, numbers: Any, scratch: Any, rank: Any) -> None:
    """Add numbers [in_blocks(rank), TILE_COLUMNS], transposed, to target [TILE_COLUMNS, rank]."""
    for row in range(in_blocks(rank) - BLOCK, -1, -BLOCK):  # what one writes beyond the rank, the next ones overwrite
        for column in range(0, TILE_COLUMNS, BLOCK):
            transpose_rows(scratch, column * rank + row, rank, numbers, row * TILE_COLUMNS + column, TILE_COLUMNS,
                           np.int64(BLOCK), BLOCK)  # fmt: skip
    add_row(target, start, scratch, 0, rank * TILE_COLUMNS)


@njit(inline="always")
def add_a_grads(call, sites, adapter, column, columns, narrow_grads, panel):  # type: ignore[no-untyped-def]
    """Add to some columns of the gradients of A of all sites; narrow_grads as `lay_rows` lays rows out."""
    rows, rank, line = adapter.stop - adapter.start, adapter.rank, line_of(call.sites, adapter.rank)
    pairs = pairs_of(adapter, sites)
    if not pairs[0].a_grads:
        return
    lay_rows(panel, 0, columns, pointer_like(panel, call.inputs), adapter.start * call.input_line + column,
             call.input_line, rows, columns)  # fmt: skip
    for number in range(call.sites):
        for own in range(0, columns, TILE_COLUMNS):
            multiply_transposed(pointer(np.float64(pairs[number].a_grads)), column + own, call.width, narrow_grads,
                                number * in_blocks(rank), line, panel, own, columns, even(rows),
                                np.float32(adapter.scale), rank, 1)  # fmt: skip


@njit(inline="always")
def add_b_grads(call, sites, adapter, number, column, columns, narrow, panel, sums, scratch):  # type: ignore[no-untyped-def]
    """Add to some rows of the gradients of B of a site; narrow as `lay_rows` lays rows out."""
    rows, rank, line = adapter.stop - adapter.start, adapter.rank, line_of(call.sites, adapter.rank)
    site, grads = sites[number], pairs_of(adapter, sites)[number].b_grads
    if not grads:
        return
    lay_rows(panel, 0, columns, pointer_like(panel, site.outputs), adapter.start * site.output_line + column,
             site.output_line, rows, columns)  # fmt: skip
    for own in range(0, columns, TILE_COLUMNS):
        multiply_transposed(sums, 0, TILE_COLUMNS, narrow, number * in_blocks(rank), line, panel, own, columns,
                            even(rows), np.float32(adapter.scale), rank, 0)  # fmt: skip
        add_transposed(pointer(np.float64(grads)), (column + own) * rank, sums, scratch, rank)


@njit(inline="always")
def parts_of(columns: Any) -> Any:
    """Parts of so many columns."""
    return (columns + PART_COLUMNS - 1) // PART_COLUMNS


@cache
def gradient_function(kind: str) -> Any:
    """A C function of a pointer to a CALL, which lives as long as this object: adds to the gradients of A and B of the
    adapters that have some."""
    _, dtype = numbers_of(kind)

    @c_function
    def add_gradients(argument):
        set_up_amx(dtype)
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
                panel, sums = np.empty(depth * PART_COLUMNS, dtype), np.zeros(slot * TILE_COLUMNS, np.float32)
                scratch = np.empty((slot + 1) * TILE_COLUMNS, np.float32)
                narrow, narrow_grads = np.empty(depth * line, dtype), np.empty(depth * line, dtype)
                lay_rows(data_of(narrow), 0, line, pointer_like(data_of(panel), adapter.narrow), 0, line, rows, line)
                lay_rows(data_of(narrow_grads), 0, line, pointer_like(data_of(panel), adapter.narrow_grads), 0, line,
                         rows, line)  # fmt: skip
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
        release_amx(dtype)

    return add_gradients


@compiled
def lay_weights(panels, column, weights, stride, depth, columns):
    """W [columns, depth] in panels [columns / TILE_COLUMNS, depth, TILE_COLUMNS] at addresses (`pointer`), from a
    column on that begins a block."""
    lay_columns(pointer(panels), column, pointer(weights), 0, stride, depth, columns)


@compiled
def pack(panels, numbers, count, storage):
    """Float32 numbers of panels as `panels` stores them. Returns bits that are 0 if they are the same then."""
    lost = np.uint32(0)
    for place in range(0, count, TILE_COLUMNS):
        if storage == BFLOAT16:
            lost |= pack_line(pointer(panels), place, pointer(numbers), place)
        else:
            lost |= pack_line(half_pointer(panels), place, pointer(numbers), place)
    return lost


@compiled
def transpose_floats(target, source, depth, columns):
    """The panels of a float32 matrix [depth, columns] as panels of the transposed one."""
    for column in range(0, columns, TILE_COLUMNS):
        for k in range(0, depth, TILE_COLUMNS):
            transpose_square(pointer(target), k * columns + column * TILE_COLUMNS, pointer(source),
                            column * depth + k * TILE_COLUMNS)  # fmt: skip


@compiled
def transpose_halves(target, source, depth, columns, storage):
    """The same of panels of two bytes a number, which are float32 numbers meanwhile (`pack`)."""
    square, result = np.empty(SQUARE, np.float32), np.empty(SQUARE, np.float32)
    for column in range(0, columns, TILE_COLUMNS):
        for k in range(0, depth, TILE_COLUMNS):
            start, place = column * depth + k * TILE_COLUMNS, k * columns + column * TILE_COLUMNS
            for line in range(0, SQUARE, TILE_COLUMNS):
                if storage == BFLOAT16:
                    widen_line(data_of(square), line, pointer(source), start + line)
                else:
                    widen_line(data_of(square), line, half_pointer(source), start + line)
            transpose_square(data_of(result), 0, data_of(square), 0)
            pack(target + 2 * place, np.float64(result.ctypes.data), SQUARE, storage)


@compiled
def transpose_pairs(target, source, depth, columns):
    """The same of panels of bfloat16 pairs: a SQUARE of them, transposed as words, is rows as `lay_rows` reads them."""
    square = np.empty(SQUARE, np.uint16)
    words = pointer(np.float64(square.ctypes.data))
    for column in range(0, columns, TILE_COLUMNS):
        for k in range(0, depth, TILE_COLUMNS):
            start = (column * depth + k * TILE_COLUMNS) // 2
            for own in range(0, TILE_COLUMNS, LANES):
                transpose_rows(words, own * LANES, LANES, pointer(np.float64(source)), start + own, TILE_COLUMNS, LANES,
                               LANES)  # fmt: skip
            lay_rows(pointer(target), k * columns + column * TILE_COLUMNS, TILE_COLUMNS, data_of(square), 0,
                     TILE_COLUMNS, TILE_COLUMNS, TILE_COLUMNS)  # fmt: skip


@njit(inline="always")
def transpose_square(target: Any, place: Any, source: Any, start: Any) -> None:
    """Write a SQUARE of float32 numbers, transposed."""
    for row in range(0, TILE_COLUMNS, LANES):
        for column in range(0, TILE_COLUMNS, LANES):
            transpose_rows(target, place + column * TILE_COLUMNS + row, TILE_COLUMNS, source,
                           start + row * TILE_COLUMNS + column, TILE_COLUMNS, LANES, LANES)  # fmt: skip


def compile_layouts(kind: str) -> None:
    """Compile what lays weights out."""
    number, _ = numbers_of(kind)
    lay_weights(number(0), 0, number(0), 0, 0, 0)
    if kind == "float32":
        pack(0, 0.0, 0, 0)
        transpose_floats(0.0, 0.0, 0, 0)
        transpose_halves(0, 0, 0, 0, 0)
    else:
        transpose_pairs(0, 0, 0, 0)
