"""The attention of a decoding step as a compiled function: a new token of each row of the KV cache.

A row is one or more parts, a shared prefix and its own tokens; the new token is the last of the last part. Scores and
probabilities are rounded to the dtype, as products round them, so that the trainer gives a token the same logprob.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit  # pyright: ignore[reportAttributeAccessIssue] - it comes by a star

from tinsmith.engine.cpu.primitives import atomic_next, c_function, pointer, void_pointer
from tinsmith.engine.cpu.rows import copy_row, fill, softmax_row
from tinsmith.engine.cpu.tiles import TILE_KEYS, TILE_QUERIES, TILE_VALUES, data_of, prefetch, score_tile, weigh_tile
from tinsmith.engine.cpu.vectors import LANES

STEP = np.dtype(
    [
        ("next", "i8"),  # row and head to compute next, which the threads count up from 0
        ("rows", "i8"),
        ("parts", "i8"),  # of each row
        ("heads", "i8"),  # of keys
        ("window", "i8"),  # tokens at the end that a token sees; 0: all
        ("line", "i8"),  # room for the scores of the longest row, a multiple of LINE
        ("table", "i8"),  # address of PART [rows, parts]
        ("layer", "i8"),
        ("queries", "i8"),  # address of [rows, heads group, key width]
        ("new_keys", "i8"),  # address of [rows, heads, key width]
        ("new_values", "i8"),
        ("outputs", "i8"),  # address of [rows, heads group, value width]
        ("scale", "f8"),
    ]
)
"""What the function gets a pointer to."""
PART = np.dtype(
    [
        ("keys", "i8"),  # address in layer 0
        ("values", "i8"),
        ("key_layer", "i8"),  # bytes from one layer to the next
        ("value_layer", "i8"),
        ("capacity", "i8"),  # tokens from one head to the next
        ("length", "i8"),  # tokens, with the new one
    ]
)
LINE = LANES
"""Scores are padded with -inf to a multiple of this."""


@njit(inline="always")
def score(query: Any, keys: Any, at: Any, scores: Any, place: Any, rest: Any, count: Any, width: Any) -> None:
    """scores[g, place + k] = query[g] . keys[at + k width] for `count` keys; `rest` queries fill no tile."""
    line, whole, queries, lines = scores.shape[1], len(query) - rest, data_of(query), data_of(scores)
    for g in range(0, whole, TILE_QUERIES):
        score_tile(queries, keys, at, lines, place, line, g, TILE_QUERIES, count, width)
    score_tile(queries, keys, at, lines, place, line, whole, rest, count, width)


@njit(inline="always")
def score_part(
    query: Any, keys: Any, start: Any, first: Any, last: Any, scores: Any, before: Any, values: Any, values_start: Any,
    rest: Any, width: Any, stride: Any, ahead: Any,
) -> None:  # fmt: skip
    """scores[g, before + k] = query[g] . keys[k] for k from first to last, while the values are brought nearer, `ahead`
    numbers with each tile."""
    k = first
    while k + TILE_KEYS <= last:
        prefetch(values, values_start + k * stride, ahead)
        score(query, keys, start + k * width, scores, before + k, rest, TILE_KEYS, width)
        k += TILE_KEYS
    while k < last:
        score(query, keys, start + k * width, scores, before + k, rest, 1, width)
        k += 1


@njit(inline="always")
def weigh(
    output: Any, values: Any, at: Any, probs: Any, place: Any, rest: Any, count: Any, width: Any, stride: Any
) -> None:
    """output[g] += sum of probs[g, place + k] values[at + k stride] for `count` values; `rest` outputs fill no tile."""
    line, whole, outputs, lines = probs.shape[1], len(output) - rest, data_of(output), data_of(probs)
    for g in range(0, whole, TILE_QUERIES):
        weigh_tile(outputs, values, at, lines, place, line, g, TILE_QUERIES, count, width, stride)
    weigh_tile(outputs, values, at, lines, place, line, whole, rest, count, width, stride)


@njit(inline="always")
def weigh_part(
    output: Any, values: Any, start: Any, first: Any, last: Any, probs: Any, before: Any,
    rest: Any, width: Any, stride: Any,
) -> None:  # fmt: skip
    """output[g] += sum of probs[g, before + k] values[k] for k from first to last."""
    k = first
    while k + TILE_VALUES <= last:
        weigh(output, values, start + k * stride, probs, before + k, rest, TILE_VALUES, width, stride)
        k += TILE_VALUES
    while k < last:
        weigh(output, values, start + k * stride, probs, before + k, rest, 1, width, stride)
        k += 1


@cache
def attention_function(is_float32: bool, group: int, key_width: int, value_width: int, value_stride: int) -> Any:
    """A C function of a pointer to a STEP, which lives as long as this object, for `group` queries of a key head and
    tokens of these widths, which are constants in its machine code. Each token's values are `value_stride` numbers
    after the last one's, more than their width if they are parts of its key."""
    number, rest = np.float64 if is_float32 else np.int64, group % TILE_QUERIES
    ahead = TILE_KEYS * value_stride

    @c_function
    def attend(argument):
        step = carray(argument, 1, STEP)[0]
        queries, outputs = pointer(number(step.queries)), pointer(number(step.outputs))
        new_keys, new_values = pointer(number(step.new_keys)), pointer(number(step.new_values))
        heads, table = step.heads, carray(void_pointer(step.table), (step.rows, step.parts), PART)
        query, output = np.empty((group, key_width), np.float32), np.empty((group, value_width), np.float32)
        scores = np.empty((group, step.line), np.float32)
        source = atomic_next(argument)
        while source < step.rows * heads:
            row, head, total = table[source // heads], source % heads, 0
            for part in row:
                total += part.length
            unseen = max(0, total - step.window) if step.window else 0
            copy_row(data_of(query), 0, queries, source * group * key_width, np.float32(step.scale), group * key_width)
            part = row[step.parts - 1]
            keys = pointer(number(part.keys + step.layer * part.key_layer))
            values = pointer(number(part.values + step.layer * part.value_layer))
            new = head * part.capacity + part.length - 1
            copy_row(keys, new * key_width, new_keys, source * key_width, np.float32(1), key_width)
            if value_width == value_stride:
                copy_row(values, new * value_width, new_values, source * value_width, np.float32(1), value_width)
            before = 0
            for part in row:
                keys = pointer(number(part.keys + step.layer * part.key_layer))
                values = pointer(number(part.values + step.layer * part.value_layer))
                start, first = head * part.capacity, min(max(0, unseen - before), part.length)
                score_part(query, keys, start * key_width, first, part.length, scores, before,
                           values, start * value_stride, rest, key_width, value_stride, ahead)  # fmt: skip
                before += part.length
            end = unseen + (total - unseen + LINE - 1) // LINE * LINE
            for g in range(group):
                fill(data_of(scores), g * step.line + total, g * step.line + end, np.float32(-np.inf))
                softmax_row(data_of(scores), g * step.line + unseen, end - unseen, queries, data_of(scores))
            output[:] = 0
            before = 0
            for part in row:
                values = pointer(number(part.values + step.layer * part.value_layer))
                first = min(max(0, unseen - before), part.length)
                weigh_part(output, values, head * part.capacity * value_stride, first, part.length, scores, before,
                           rest, value_width, value_stride)  # fmt: skip
                before += part.length
            copy_row(outputs, source * group * value_width, data_of(output), 0, np.float32(1), group * value_width)
            source = atomic_next(argument)

    return attend
