"""The attention of a packed tree as compiled functions, forward and backward.

A call is some consecutive queries and the runs of keys that they see, the last of which are masked. A key head of a
call is computed at once: its keys and values are copied as float32, laid out for products, and its queries follow in
blocks. Scores and probabilities are rounded to the dtype, as products round them; gradients are float32 inside. Where
the processor is fastest with pairs of bfloat16 numbers, factors of bfloat16 values are laid out as such (`panels`).

Each query head's row of a query is one row of its block, those that share a key head side by side.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, types  # pyright: ignore[reportAttributeAccessIssue] - they come by a star
from numba.extending import overload  # pyright: ignore[reportAttributeAccessIssue] - it comes by a star

from tinsmith.engine.cpu.panels import BLOCK, PANEL_LINE, even, lay_depth, lay_in_order, lay_rows
from tinsmith.engine.cpu.primitives import atomic_next, c_function, load, numbers_of, pointer, store, void_pointer
from tinsmith.engine.cpu.rows import (
    add_row,
    copy_row,
    fill,
    mask_row,
    pair_float_rows,
    softmax_backward_row,
    softmax_row,
)
from tinsmith.engine.cpu.tiles import (
    PAIR_ROWS,
    TILE_COLUMNS,
    TILE_ROWS,
    data_of,
    panel_tile,
    product_tile,
)

MATRIX = np.dtype([("data", "i8"), ("head", "i8"), ("token", "i8")])
"""Address of numbers [heads, tokens, width], and numbers from one head and token to the next."""
SOURCE = np.dtype([("keys", MATRIX), ("values", MATRIX)])
PASS = np.dtype(
    [
        ("next", "i8"),  # part to compute next, which the threads count up from 0
        ("parts", "i8"),
        ("bounds", "i8"),  # address of int64 [parts + 1]: the first item of each part; an item is a key head of a call
        ("calls", "i8"),
        ("call_table", "i8"),  # address of CALL [calls]
        ("runs", "i8"),
        ("run_table", "i8"),  # address of RUN [runs]
        ("sources", "i8"),
        ("source_table", "i8"),  # address of SOURCE [sources]
        ("keys_at_most", "i8"),  # of a call
        ("group", "i8"),  # query heads of a key head
        ("key_width", "i8"),
        ("value_width", "i8"),
        ("scale", "f8"),
        ("queries", MATRIX),
        ("outputs", MATRIX),
        ("output_grads", MATRIX),
        ("query_grads", MATRIX),
        ("key_grads", MATRIX),  # float32 [parts, heads, tokens, width], of the first source alone
        ("value_grads", MATRIX),
        ("key_grads_part", "i8"),  # numbers from one part to the next
        ("value_grads_part", "i8"),
    ]
)
"""What a function gets a pointer to."""
NOTHING = {name: (0, 0, 0) if PASS[name] == MATRIX else 0 for name in PASS.names or ()}
"""The fields of a PASS, where there is nothing."""
CALL = np.dtype(
    [
        ("start", "i8"),  # its first query
        ("count", "i8"),
        ("first_run", "i8"),  # of RUN
        ("runs", "i8"),
        ("keys", "i8"),
        ("seen", "i8"),  # address of int64 [count]: keys up to the last that a query sees
        ("masked", "i8"),  # keys that are masked, at the end
        ("visible", "i8"),  # address of bool [count, masked]
    ]
)
RUN = np.dtype([("start", "i8"), ("count", "i8"), ("source", "i8")])
BLOCK_ROWS = TILE_ROWS * 4


class Block(NamedTuple):
    """Some rows of a key head's queries in a call: a query head of a query each."""

    call: Any
    head: Any
    group: Any
    row: Any
    """The first."""
    rows: Any


@njit(inline="always")
def padded(count: Any) -> Any:
    """A count of columns in whole tiles."""
    return (count + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS


def read_rows(target: Any, at: Any, line: Any, numbers: Any, matrix: Any, head: Any, run: Any, width: Any) -> None:
    """Read a run of keys or values as rows from `at` on of a target: float32 [keys, line], or bfloat16 in pairs of rows
    [keys / 2, line, 2], the second row first, with zeros after an odd number of keys."""


@overload(read_rows)
def _read_rows(target, at, line, numbers, matrix, head, run, width):
    def whole(target, at, line, numbers, matrix, head, run, width):
        start = head * matrix.head + run.start * matrix.token
        for row in range(run.count):
            copy_row(target, (at + row) * line, numbers, start + row * matrix.token, np.float32(1), width)

    def in_pairs(target, at, line, numbers, matrix, head, run, width):
        start, row = head * matrix.head + run.start * matrix.token, at % 2
        if row:
            for i in range(width):
                target[at // 2 * 2 * line + 2 * i] = numbers[start + i]
        lay_in_order(target, (at + row) // 2 * 2 * line, line, numbers, start + row * matrix.token, matrix.token,
                     run.count - row, width)  # fmt: skip

    return in_pairs if target.dtype == types.uint16 else whole


def read_columns(target: Any, at: Any, numbers: Any, matrix: Any, head: Any, run: Any, width: Any) -> None:
    """Read a run of keys or values as columns from `at` on of a target: float32 [tiles, even(width), TILE_COLUMNS], or
    bfloat16 in panels of pairs [panels, even(width) / 2, TILE_COLUMNS, 2]."""


@overload(read_columns)
def _read_columns(target, at, numbers, matrix, head, run, width):
    def whole(target, at, numbers, matrix, head, run, width):
        start = head * matrix.head + run.start * matrix.token
        for row in range(run.count):
            column = (at + row) // TILE_COLUMNS * TILE_COLUMNS * even(width) + (at + row) % TILE_COLUMNS
            for i in range(width):
                store(target, column + i * TILE_COLUMNS, load(numbers, start + row * matrix.token + i))

    def in_pairs(target, at, numbers, matrix, head, run, width):
        start, row = head * matrix.head + run.start * matrix.token, 0
        while row < run.count:
            key, own = at + row, start + row * matrix.token
            place = key // TILE_COLUMNS * TILE_COLUMNS * even(width) + 2 * (key % TILE_COLUMNS)
            if key % BLOCK == 0 and row + BLOCK <= run.count and width % 8 == 0:
                lay_depth(target, place, numbers, own, matrix.token, width, 15, 16)
                row += BLOCK
            else:
                for i in range(width):
                    target[place + i // 2 * PANEL_LINE + i % 2] = numbers[own + i]
                if width % 2:
                    target[place + width // 2 * PANEL_LINE + 1] = 0
                row += 1

    return in_pairs if target.dtype == types.uint16 else whole


@njit(inline="always")
def add_to_keys(
    numbers: Any, matrix: Any, start: Any, call: Any, runs: Any, head: Any, sums: Any, line: Any, width: Any
) -> None:
    """Add the rows of sums [keys, line] to those of a call's keys or values."""
    at = 0
    for run in runs[call.first_run : call.first_run + call.runs]:
        for key in range(run.start, run.start + run.count):
            add_row(numbers, start + head * matrix.head + key * matrix.token, sums, at * line, width)
            at += 1


@njit(inline="always")
def place_of(matrix: Any, block: Any, r: Any) -> Any:
    """Where the numbers of a block's row begin."""
    row = block.row + r
    return (block.head * block.group + row % block.group) * matrix.head + (
        block.call.start + row // block.group
    ) * matrix.token


@njit(inline="always")
def read_block(target: Any, line: Any, numbers: Any, matrix: Any, block: Any, factor: Any, width: Any) -> None:
    """Read a block's rows, times a factor."""
    for r in range(block.rows):
        copy_row(target, r * line, numbers, place_of(matrix, block, r), np.float32(factor), width)


@njit(inline="always")
def write_block(numbers: Any, matrix: Any, block: Any, rows: Any, line: Any, factor: Any, width: Any) -> None:
    """Store a block's rows, times a factor."""
    for r in range(block.rows):
        copy_row(numbers, place_of(matrix, block, r), rows, r * line, np.float32(factor), width)


@njit(inline="always")
def multiply(
    outputs: Any, line: Any, left: Any, left_line: Any, left_step: Any, right: Any, tile_step: Any, right_line: Any,
    depth: Any, rows: Any, columns: Any, adds: Any,
) -> None:  # fmt: skip
    """outputs [rows, columns] = left [rows, depth] right [depth, columns], or plus it, in whole tiles. Each tile of the
    right side's columns begins `tile_step` numbers after the last one, and has lines of `right_line`."""
    for tile in range(columns // TILE_COLUMNS):
        for row in range(0, rows, TILE_ROWS):
            product_tile(outputs, row * line + tile * TILE_COLUMNS, line, left, row * left_line, left_line, left_step,
                         right, tile * tile_step, right_line, depth, TILE_ROWS, adds)  # fmt: skip


@njit(inline="always")
def multiply_in_pairs(
    outputs: Any, line: Any, left: Any, left_line: Any, left_step: Any, right: Any, tile_step: Any, right_line: Any,
    depth: Any, rows: Any, columns: Any, adds: Any,
) -> None:  # fmt: skip
    """The same of bfloat16 numbers in pairs."""
    for tile in range(columns // TILE_COLUMNS):
        for row in range(0, rows, PAIR_ROWS):
            panel_tile(outputs, row * line + tile * TILE_COLUMNS, line, left, row * left_line, left_line, left_step,
                      right, tile * tile_step, right_line, even(depth), np.float32(1), PAIR_ROWS, adds, 0)  # fmt: skip


def multiply_by_columns(
    outputs: Any, line: Any, left: Any, left_line: Any, columns: Any, width: Any, rows: Any, count: Any
) -> None:
    """outputs [rows, count] = left [rows, width] columns, which are in tiles."""


@overload(multiply_by_columns)
def _multiply_by_columns(outputs, line, left, left_line, columns, width, rows, count):
    def whole(outputs, line, left, left_line, columns, width, rows, count):
        multiply(outputs, line, left, left_line, 1, columns, even(width) * TILE_COLUMNS, TILE_COLUMNS, width, rows,
                 count, False)  # fmt: skip

    def in_pairs(outputs, line, left, left_line, columns, width, rows, count):
        multiply_in_pairs(outputs, line, left, left_line, 2, columns, even(width) * TILE_COLUMNS, PANEL_LINE, width,
                          rows, count, False)  # fmt: skip

    return in_pairs if columns.dtype == types.uint16 else whole


def multiply_by_rows(outputs: Any, line: Any, left: Any, left_line: Any, keys: Any, seen: Any, rows: Any) -> None:
    """outputs [rows, line] = left [rows, seen] keys [seen, line]."""


@overload(multiply_by_rows)
def _multiply_by_rows(outputs, line, left, left_line, keys, seen, rows):
    def whole(outputs, line, left, left_line, keys, seen, rows):
        multiply(outputs, line, left, left_line, 1, keys, TILE_COLUMNS, line, seen, rows, line, False)

    def in_pairs(outputs, line, left, left_line, keys, seen, rows):
        multiply_in_pairs(outputs, line, left, left_line, 2, keys, PANEL_LINE, 2 * line, seen, rows, line, False)

    return in_pairs if keys.dtype == types.uint16 else whole


@njit(inline="always")
def add_transposed(sums: Any, line: Any, left: Any, left_line: Any, block: Any, rows: Any, count: Any) -> None:
    """sums [count, line] += left [rows, count] transposed, times block [rows, line]."""
    multiply(sums, line, left, 1, left_line, block, TILE_COLUMNS, line, rows, count, line, True)


def add_value_sums(
    sums: Any, line: Any, probs: Any, probs_line: Any, block: Any, rows: Any, count: Any, left: Any, right: Any
) -> None:
    """`add_transposed` of probabilities and gradients of outputs; `left` and `right` have room for both in pairs."""


@overload(add_value_sums)
def _add_value_sums(sums, line, probs, probs_line, block, rows, count, left, right):
    def whole(sums, line, probs, probs_line, block, rows, count, left, right):
        add_transposed(sums, line, probs, probs_line, block, rows, count)

    def in_pairs(sums, line, probs, probs_line, block, rows, count, left, right):
        if rows % 2:
            fill(probs, rows * probs_line, rows * probs_line + count, np.float32(0))
        for row in range(0, rows, 2):
            pair_float_rows(left, row * probs_line, probs, row * probs_line, (row + 1) * probs_line, count)
        lay_rows(right, 0, line, block, 0, line, rows, line)
        multiply_in_pairs(sums, line, left, 2, 2 * probs_line, right, PANEL_LINE, 2 * line, rows, count, line, True)

    return in_pairs if block.dtype == types.uint16 else whole


@njit(inline="always")
def seen_by(block: Any) -> Any:
    """Keys up to the last that any of a block's rows sees, and these in whole tiles."""
    seen, most = carray(void_pointer(block.call.seen), block.call.count, np.int64), 0
    for query in range(block.row // block.group, (block.row + block.rows - 1) // block.group + 1):
        most = max(most, seen[query])
    return most, padded(most)


@njit(inline="always")
def to_probabilities(scores: Any, line: Any, block: Any, columns: Any, like: Any, probs: Any) -> None:
    """A block's scores to probabilities, which may be in their place, 0 after what is seen and for a tile of rows
    more."""
    call = block.call
    seen = carray(void_pointer(call.seen), call.count, np.int64)
    visible = data_of(carray(void_pointer(call.visible), call.count * call.masked, np.uint8))
    unmasked = call.keys - call.masked
    for r in range(block.rows):
        query = (block.row + r) // block.group
        count = max(0, seen[query] - unmasked)
        mask_row(scores, r * line + unmasked, visible, query * call.masked, count)
        fill(scores, r * line + seen[query], r * line + columns, np.float32(-np.inf))
        softmax_row(scores, r * line, columns, like, probs)
        fill(probs, r * line + columns, r * line + columns + TILE_ROWS, np.float32(0))


@njit(inline="always")
def to_score_grads(grads: Any, line: Any, probs: Any, rows: Any, columns: Any) -> None:
    """Gradients of probabilities to those of scores, 0 for a tile of rows more."""
    for r in range(rows):
        softmax_backward_row(grads, r * line, probs, r * line, columns)
        fill(grads, r * line + columns, r * line + columns + TILE_ROWS, np.float32(0))


@njit(inline="always")
def clear(
    value_columns: Any, width: Any, key_sums: Any, key_line: Any, value_sums: Any, value_line: Any, keys: Any
) -> None:
    """Zeros where gradients of a call's keys and values are summed, and in the last tile of its values."""
    fill(value_columns, (keys - TILE_COLUMNS) * width, keys * width, np.float32(0))
    fill(key_sums, 0, (keys + TILE_ROWS) * key_line, np.float32(0))
    fill(value_sums, 0, (keys + TILE_ROWS) * value_line, np.float32(0))


@njit(inline="always")
def tables_of(whole: Any) -> Any:
    """Bounds, calls, runs and sources of a pass."""
    return (
        carray(void_pointer(whole.bounds), whole.parts + 1, np.int64),
        carray(void_pointer(whole.call_table), whole.calls, CALL),
        carray(void_pointer(whole.run_table), whole.runs, RUN),
        carray(void_pointer(whole.source_table), whole.sources, SOURCE),
    )


@cache
def forward_function(kind: str) -> Any:
    """A C function of a pointer to a PASS, which lives as long as this object: fills the outputs."""
    number, dtype = numbers_of(kind)

    @c_function
    def attend(argument):
        whole = carray(argument, 1, PASS)[0]
        bounds, calls, runs, sources = tables_of(whole)
        queries, outputs = pointer(number(whole.queries.data)), pointer(number(whole.outputs.data))
        group, width, value_width = whole.group, whole.key_width, whole.value_width
        value_line, line = padded(value_width), padded(whole.keys_at_most) + TILE_COLUMNS
        key_columns, value_rows = np.empty(line * even(width), dtype), np.empty(line * value_line, dtype)
        query, output = np.zeros(BLOCK_ROWS * even(width), dtype), np.zeros(BLOCK_ROWS * value_line, np.float32)
        scores, probs = np.zeros(BLOCK_ROWS * line, np.float32), np.zeros(BLOCK_ROWS * line, dtype)
        part = atomic_next(argument)
        while part < whole.parts:
            for item in range(bounds[part], bounds[part + 1]):
                call, head, at = calls[item % whole.calls], item // whole.calls, 0
                for run in runs[call.first_run : call.first_run + call.runs]:
                    source = sources[run.source]
                    keys, values = pointer(number(source.keys.data)), pointer(number(source.values.data))
                    read_columns(data_of(key_columns), at, keys, source.keys, head, run, width)
                    read_rows(data_of(value_rows), at, value_line, values, source.values, head, run, value_width)
                    at += run.count
                for row in range(0, call.count * group, BLOCK_ROWS):
                    block = Block(call, head, group, row, min(BLOCK_ROWS, call.count * group - row))
                    rows, (seen, count) = block.rows, seen_by(block)
                    read_block(data_of(query), even(width), queries, whole.queries, block, whole.scale, width)
                    multiply_by_columns(data_of(scores), line, data_of(query), even(width), data_of(key_columns), width,
                                        rows, count)  # fmt: skip
                    to_probabilities(data_of(scores), line, block, count, queries, data_of(probs))
                    multiply_by_rows(data_of(output), value_line, data_of(probs), line, data_of(value_rows), seen, rows)
                    write_block(outputs, whole.outputs, block, data_of(output), value_line, 1, value_width)
            part = atomic_next(argument)

    return attend


@cache
def backward_function(kind: str) -> Any:
    """A C function of a pointer to a PASS, which lives as long as this object: fills the gradients of queries, and adds
    to those of keys and values."""
    number, dtype = numbers_of(kind)

    @c_function
    def attend_backward(argument):
        whole = carray(argument, 1, PASS)[0]
        bounds, calls, runs, sources = tables_of(whole)
        source, output_grads = sources[0], pointer(number(whole.output_grads.data))
        queries, query_grads = pointer(number(whole.queries.data)), pointer(number(whole.query_grads.data))
        keys, values = pointer(number(source.keys.data)), pointer(number(source.values.data))
        key_grads, value_grads = pointer(np.float64(whole.key_grads.data)), pointer(np.float64(whole.value_grads.data))
        group, width, value_width = whole.group, whole.key_width, whole.value_width
        key_line, value_line, line = padded(width), padded(value_width), padded(whole.keys_at_most) + TILE_COLUMNS
        key_columns, value_columns = np.empty(line * even(width), dtype), np.empty(line * even(value_width), dtype)
        key_rows, key_sums = np.zeros(line * key_line, np.float32), np.empty(line * key_line, np.float32)
        value_sums, output_grad = np.empty(line * value_line, np.float32), np.zeros(BLOCK_ROWS * value_line, dtype)
        query, query_grad = np.zeros(BLOCK_ROWS * key_line, dtype), np.zeros(BLOCK_ROWS * key_line, np.float32)
        probs, probs_pairs = np.zeros(BLOCK_ROWS * line, np.float32), np.zeros(BLOCK_ROWS * line, np.uint16)
        grads, grads_pairs = np.zeros(BLOCK_ROWS * line, np.float32), np.zeros(BLOCK_ROWS * value_line, np.uint16)
        part = atomic_next(argument)
        while part < whole.parts:
            for item in range(bounds[part], bounds[part + 1]):
                call, head, at = calls[item % whole.calls], item // whole.calls, 0
                clear(data_of(value_columns), even(value_width), data_of(key_sums), key_line, data_of(value_sums),
                      value_line, padded(call.keys))  # fmt: skip
                for run in runs[call.first_run : call.first_run + call.runs]:
                    read_columns(data_of(key_columns), at, keys, source.keys, head, run, width)
                    read_rows(data_of(key_rows), at, key_line, keys, source.keys, head, run, width)
                    read_columns(data_of(value_columns), at, values, source.values, head, run, value_width)
                    at += run.count
                for row in range(0, call.count * group, BLOCK_ROWS):
                    block = Block(call, head, group, row, min(BLOCK_ROWS, call.count * group - row))
                    rows, (seen, count) = block.rows, seen_by(block)
                    read_block(data_of(query), key_line, queries, whole.queries, block, whole.scale, width)
                    read_block(
                        data_of(output_grad), value_line, output_grads, whole.output_grads, block, 1, value_width
                    )
                    multiply_by_columns(data_of(probs), line, data_of(query), key_line, data_of(key_columns), width,
                                        rows, count)  # fmt: skip
                    to_probabilities(data_of(probs), line, block, count, queries, data_of(probs))
                    multiply_by_columns(data_of(grads), line, data_of(output_grad), value_line, data_of(value_columns),
                                        value_width, rows, count)  # fmt: skip
                    to_score_grads(data_of(grads), line, data_of(probs), rows, count)
                    multiply_by_rows(data_of(query_grad), key_line, data_of(grads), line, data_of(key_rows), seen, rows)
                    write_block(
                        query_grads, whole.query_grads, block, data_of(query_grad), key_line, whole.scale, width
                    )
                    add_transposed(data_of(key_sums), key_line, data_of(grads), line, data_of(query), rows, count)
                    add_value_sums(data_of(value_sums), value_line, data_of(probs), line, data_of(output_grad), rows,
                                   count, data_of(probs_pairs), data_of(grads_pairs))  # fmt: skip
                add_to_keys(key_grads, whole.key_grads, part * whole.key_grads_part, call, runs, head,
                            data_of(key_sums), key_line, width)  # fmt: skip
                add_to_keys(value_grads, whole.value_grads, part * whole.value_grads_part, call, runs, head,
                            data_of(value_sums), value_line, value_width)  # fmt: skip
            part = atomic_next(argument)

    return attend_backward
