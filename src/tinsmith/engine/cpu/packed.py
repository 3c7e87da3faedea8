"""The attention of a packed tree as compiled functions, forward and backward.

A call is some consecutive queries and the runs of keys that they see, the last of which are masked. A key head of a call
is computed at once: its keys and values are copied as float32, laid out for products, and its queries follow block by
block. Scores and probabilities are rounded to the dtype, as products round them; gradients are float32 inside.

Each query head's row of a query is one row of its block, those that share a key head side by side.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types  # pyright: ignore[reportAttributeAccessIssue] - two come by a star

from tinsmith.engine.cpu.primitives import atomic_next, flags, load, pointer, store, void_pointer
from tinsmith.engine.cpu.rows import add_row, fill, mask_row, read_row, softmax_backward_row, softmax_row, write_row
from tinsmith.engine.cpu.tiles import TILE_COLUMNS, TILE_ROWS, data_of, product_tile

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




@njit(inline="always")
def padded(count: Any) -> Any:
    """A count of columns in whole tiles."""
    return (count + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS


@njit(inline="always")
def read_columns(target: Any, first: Any, source: Any, start: Any, step: Any, count: Any, width: Any) -> None:
    """Read `count` rows as columns, from `first` on, of target [tiles, width, TILE_COLUMNS]."""
    for row in range(count):
        at = (first + row) // TILE_COLUMNS * TILE_COLUMNS * width + (first + row) % TILE_COLUMNS
        for i in range(width):
            store(target, at + i * TILE_COLUMNS, load(source, start + row * step + i))


@njit(inline="always")
def read_rows(target: Any, at: Any, line: Any, source: Any, start: Any, step: Any, count: Any, width: Any) -> None:
    """Read `count` rows to lines."""
    for row in range(count):
        read_row(target, at + row * line, source, start + row * step, np.float32(1), width)


@njit(inline="always")
def place_of(matrix: Any, call: Any, head: Any, group: Any, row: Any) -> Any:
    """Where a row of a key head's queries begins."""
    return (head * group + row % group) * matrix.head + (call.start + row // group) * matrix.token


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
def seen_by(call: Any, group: Any, row: Any, rows: Any) -> Any:
    """Keys up to the last that any of the rows sees."""
    seen, most = carray(void_pointer(call.seen), call.count, np.int64), 0
    for query in range(row // group, (row + rows - 1) // group + 1):
        most = max(most, seen[query])
    return most


@njit(inline="always")
def to_probabilities(
    scores: Any, line: Any, call: Any, group: Any, row: Any, rows: Any, columns: Any, like: Any
) -> None:  # fmt: skip
    """Scores of the rows from `row` on to probabilities, 0 after what is seen and for a tile of rows more."""
    seen = carray(void_pointer(call.seen), call.count, np.int64)
    visible = flags(call.visible)
    unmasked = call.keys - call.masked
    for r in range(rows):
        query = (row + r) // group
        count = max(0, seen[query] - unmasked)
        mask_row(scores, r * line + unmasked, visible, query * call.masked, count)
        fill(scores, r * line + seen[query], r * line + columns, np.float32(-np.inf))
        softmax_row(scores, r * line, columns, like)
        fill(scores, r * line + columns, r * line + columns + TILE_ROWS, np.float32(0))


@cache
def forward_function(is_float32: bool) -> Any:
    """A C function of a pointer to a PASS, which lives as long as this object: fills the outputs."""
    number = np.float64 if is_float32 else np.int64

    @cfunc(types.void(types.voidptr), nopython=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})
    def attend(argument):
        whole = carray(argument, 1, PASS)[0]
        queries, outputs = pointer(number(whole.queries.data)), pointer(number(whole.outputs.data))
        bounds = carray(void_pointer(whole.bounds), whole.parts + 1, np.int64)
        calls = carray(void_pointer(whole.call_table), whole.calls, CALL)
        runs = carray(void_pointer(whole.run_table), whole.runs, RUN)
        sources = carray(void_pointer(whole.source_table), whole.sources, SOURCE)
        group, width, value_width = whole.group, whole.key_width, whole.value_width
        value_line, line = padded(value_width), padded(whole.keys_at_most) + TILE_COLUMNS
        key_columns, value_rows = np.empty(line * width, np.float32), np.empty(line * value_line, np.float32)
        query, output = np.zeros(BLOCK_ROWS * width, np.float32), np.zeros(BLOCK_ROWS * value_line, np.float32)
        probs = np.zeros(BLOCK_ROWS * line, np.float32)
        part = atomic_next(argument)
        while part < whole.parts:
            for item in range(bounds[part], bounds[part + 1]):
                call, head, at = calls[item % whole.calls], item // whole.calls, 0
                for run in runs[call.first_run : call.first_run + call.runs]:
                    source = sources[run.source]
                    keys, values = pointer(number(source.keys.data)), pointer(number(source.values.data))
                    start = head * source.keys.head + run.start * source.keys.token
                    read_columns(data_of(key_columns), at, keys, start, source.keys.token, run.count, width)
                    start = head * source.values.head + run.start * source.values.token
                    read_rows(data_of(value_rows), at * value_line, value_line, values, start, source.values.token,
                              run.count, value_width)  # fmt: skip
                    at += run.count
                for row in range(0, call.count * group, BLOCK_ROWS):
                    rows = min(BLOCK_ROWS, call.count * group - row)
                    seen = seen_by(call, group, row, rows)
                    for r in range(rows):
                        start = place_of(whole.queries, call, head, group, row + r)
                        read_row(data_of(query), r * width, queries, start, np.float32(whole.scale), width)
                    multiply(data_of(probs), line, data_of(query), width, 1, data_of(key_columns),
                             width * TILE_COLUMNS, TILE_COLUMNS, width, rows, padded(seen), False)  # fmt: skip
                    to_probabilities(data_of(probs), line, call, group, row, rows, padded(seen), queries)
                    multiply(data_of(output), value_line, data_of(probs), line, 1, data_of(value_rows),
                             TILE_COLUMNS, value_line, seen, rows, value_line, False)  # fmt: skip
                    for r in range(rows):
                        start = place_of(whole.outputs, call, head, group, row + r)
                        write_row(outputs, start, data_of(output), r * value_line, np.float32(1), value_width)
            part = atomic_next(argument)

    return attend


@cache
def backward_function(is_float32: bool) -> Any:
    """A C function of a pointer to a PASS, which lives as long as this object: fills the gradients of queries, and adds
    to those of keys and values."""
    number = np.float64 if is_float32 else np.int64

    @cfunc(types.void(types.voidptr), nopython=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})
    def attend_backward(argument):
        whole = carray(argument, 1, PASS)[0]
        queries, query_grads = pointer(number(whole.queries.data)), pointer(number(whole.query_grads.data))
        output_grads = pointer(number(whole.output_grads.data))
        source = carray(void_pointer(whole.source_table), whole.sources, SOURCE)[0]
        keys, values = pointer(number(source.keys.data)), pointer(number(source.values.data))
        key_grads = pointer(np.float64(whole.key_grads.data))
        value_grads = pointer(np.float64(whole.value_grads.data))
        bounds = carray(void_pointer(whole.bounds), whole.parts + 1, np.int64)
        calls = carray(void_pointer(whole.call_table), whole.calls, CALL)
        runs = carray(void_pointer(whole.run_table), whole.runs, RUN)
        group, width, value_width = whole.group, whole.key_width, whole.value_width
        key_line, value_line = padded(width), padded(value_width)
        line = padded(whole.keys_at_most) + TILE_COLUMNS
        key_columns, value_columns = np.empty(line * width, np.float32), np.empty(line * value_width, np.float32)
        key_rows = np.zeros(line * key_line, np.float32)
        key_sums, value_sums = np.empty(line * key_line, np.float32), np.empty(line * value_line, np.float32)
        query, query_grad = np.zeros(BLOCK_ROWS * key_line, np.float32), np.zeros(BLOCK_ROWS * key_line, np.float32)
        output_grad = np.zeros(BLOCK_ROWS * value_line, np.float32)
        probs, grads = np.zeros(BLOCK_ROWS * line, np.float32), np.zeros(BLOCK_ROWS * line, np.float32)
        part = atomic_next(argument)
        while part < whole.parts:
            for item in range(bounds[part], bounds[part + 1]):
                call, head, at = calls[item % whole.calls], item // whole.calls, 0
                # what is after the last key is multiplied by 0
                fill(data_of(value_columns), call.keys // TILE_COLUMNS * TILE_COLUMNS * value_width,
                     padded(call.keys) * value_width, np.float32(0))  # fmt: skip
                fill(data_of(key_sums), 0, (padded(call.keys) + TILE_ROWS) * key_line, np.float32(0))
                fill(data_of(value_sums), 0, (padded(call.keys) + TILE_ROWS) * value_line, np.float32(0))
                for run in runs[call.first_run : call.first_run + call.runs]:
                    start = head * source.keys.head + run.start * source.keys.token
                    read_columns(data_of(key_columns), at, keys, start, source.keys.token, run.count, width)
                    read_rows(data_of(key_rows), at * key_line, key_line, keys, start, source.keys.token, run.count,
                              width)  # fmt: skip
                    start = head * source.values.head + run.start * source.values.token
                    read_columns(data_of(value_columns), at, values, start, source.values.token, run.count, value_width)
                    at += run.count
                for row in range(0, call.count * group, BLOCK_ROWS):
                    rows = min(BLOCK_ROWS, call.count * group - row)
                    seen = seen_by(call, group, row, rows)
                    columns = padded(seen)
                    for r in range(rows):
                        start = place_of(whole.queries, call, head, group, row + r)
                        read_row(data_of(query), r * key_line, queries, start, np.float32(whole.scale), width)
                        start = place_of(whole.output_grads, call, head, group, row + r)
                        read_row(data_of(output_grad), r * value_line, output_grads, start, np.float32(1), value_width)
                    multiply(data_of(probs), line, data_of(query), key_line, 1, data_of(key_columns),
                             width * TILE_COLUMNS, TILE_COLUMNS, width, rows, columns, False)  # fmt: skip
                    to_probabilities(data_of(probs), line, call, group, row, rows, columns, queries)
                    multiply(data_of(grads), line, data_of(output_grad), value_line, 1, data_of(value_columns),
                             value_width * TILE_COLUMNS, TILE_COLUMNS, value_width, rows, columns, False)  # fmt: skip
                    for r in range(rows):
                        softmax_backward_row(data_of(grads), r * line, data_of(probs), r * line, columns)
                        fill(data_of(grads), r * line + columns, r * line + columns + TILE_ROWS, np.float32(0))
                    multiply(data_of(query_grad), key_line, data_of(grads), line, 1, data_of(key_rows),
                             TILE_COLUMNS, key_line, seen, rows, key_line, False)  # fmt: skip
                    for r in range(rows):
                        start = place_of(whole.query_grads, call, head, group, row + r)
                        write_row(query_grads, start, data_of(query_grad), r * key_line, np.float32(whole.scale), width)
                    multiply(data_of(key_sums), key_line, data_of(grads), 1, line, data_of(query),
                             TILE_COLUMNS, key_line, rows, columns, key_line, True)  # fmt: skip
                    multiply(data_of(value_sums), value_line, data_of(probs), 1, line, data_of(output_grad),
                             TILE_COLUMNS, value_line, rows, columns, value_line, True)  # fmt: skip
                at = 0
                for run in runs[call.first_run : call.first_run + call.runs]:
                    for k in range(run.start, run.start + run.count):
                        start = part * whole.key_grads_part + head * whole.key_grads.head + k * whole.key_grads.token
                        add_row(key_grads, start, data_of(key_sums), at * key_line, width)
                        start = (
                            part * whole.value_grads_part + head * whole.value_grads.head + k * whole.value_grads.token
                        )
                        add_row(value_grads, start, data_of(value_sums), at * value_line, value_width)
                        at += 1
            part = atomic_next(argument)

    return attend_backward
