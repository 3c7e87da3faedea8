"""The attention of a decoding step as a compiled function: a new token of each row of the KV cache.

A row is one or more parts, a shared prefix and its own tokens; the new token is the last of the last part. Scores and
probabilities are rounded to the dtype, as products round them. Sums are those of `packed`, in the same order, so that
the trainer computes the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit, types  # pyright: ignore[reportAttributeAccessIssue] - they come by a star
from numba.extending import overload  # pyright: ignore[reportAttributeAccessIssue] - it comes by a star

from tinsmith.engine.cpu.loops import add_norm_rows, norm_rotate_rows, norm_rows, rotate_rows, silu_mul_numbers
from tinsmith.engine.cpu.panels import BLOCK, HALF_ROWS, lay_columns, lay_depth
from tinsmith.engine.cpu.primitives import (
    atomic_next,
    c_function,
    numbers_of,
    pointer,
    run_alone,
    run_threads,
    void_pointer,
)
from tinsmith.engine.cpu.rows import copy_row, fill, softmax_row
from tinsmith.engine.cpu.tiles import (
    TILE_COLUMNS,
    TILE_QUERIES,
    TILE_VALUES,
    data_of,
    prefetch,
    score_tile,
    weigh_pairs,
    weigh_tile,
)
from tinsmith.engine.cpu.vectors import HAS_32_REGISTERS, LANES

STEP = np.dtype(
    [
        ("next", "i8"),  # row and head to compute next, which the threads count up from 0
        ("rows", "i8"),
        ("parts", "i8"),  # of each row
        ("heads", "i8"),  # of keys
        ("window", "i8"),  # tokens at the end that a token sees; 0: all
        ("line", "i8"),  # room for the scores of the longest row and TILE_COLUMNS more, a multiple of LINE
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
WIDTH_OF_PAIRS = 16
"""What widths must be multiples of, so that pairs are multiplied."""
SCORE_ROWS = 8 if HAS_32_REGISTERS else 4
"""Queries that are multiplied with keys at a time."""
BLOCKS_AHEAD = 4
"""How many blocks of keys before it is read one is brought nearer."""


def lay_keys(panel: Any, column: Any, keys: Any, start: Any, width: Any, count: Any) -> None:
    """Lay `count` keys out as columns of a panel, from a column on that begins a block; what follows to the end of the
    block means nothing."""


@overload(lay_keys, prefer_literal=True)
def _lay_keys(panel, column, keys, start, width, count):
    def whole(panel, column, keys, start, width, count):
        lay_columns(panel, column, keys, start, width, width, count)

    def in_pairs(panel, column, keys, start, width, count):
        lay_depth(panel, 2 * column, keys, start, width, width, count - 1, 16)

    return in_pairs if panel.dtype == types.uint16 else whole


@njit(inline="always")
def score_part(
    query: Any, keys: Any, start: Any, first: Any, last: Any, scores: Any, before: Any, panel: Any, rest: Any,
    width: Any, ahead: Any,
) -> None:  # fmt: skip
    """scores[g, before + k] = query[g] . keys[k] for k from first to last, and for some k after that, which mean
    nothing; `rest` queries fill no tile. `ahead` numbers of later keys are brought nearer with each block."""
    line, whole, queries, lines = scores.shape[1], len(query) - rest, data_of(query), data_of(scores)
    for k in range(first, last, TILE_COLUMNS):
        for block in range(k, min(k + TILE_COLUMNS, last), BLOCK):
            prefetch(keys, start + (block + BLOCKS_AHEAD * BLOCK) * width, ahead)
            lay_keys(data_of(panel), block - k, keys, start + block * width, width, min(BLOCK, last - block))
        for g in range(0, whole, SCORE_ROWS):
            score_tile(lines, g * line + before + k, line, queries, g * width, data_of(panel), width, SCORE_ROWS)
        score_tile(lines, whole * line + before + k, line, queries, whole * width, data_of(panel), width, rest)


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


@njit(inline="always")
def keys_of(number: Any, step: Any, part: Any) -> Any:
    """A part's keys in the step's layer."""
    return pointer(number(part.keys + step.layer * part.key_layer))


@njit(inline="always")
def values_of(number: Any, step: Any, part: Any) -> Any:
    """A part's values in the step's layer."""
    return pointer(number(part.values + step.layer * part.value_layer))


@njit(inline="always")
def add_token(number: Any, step: Any, part: Any, source: Any, key_width: Any, value_width: Any, stride: Any) -> None:
    """Write the new token's key and value to the cache; values that are parts of keys are written with them."""
    new = source % step.heads * part.capacity + part.length - 1
    keys, new_keys = keys_of(number, step, part), pointer(number(step.new_keys))
    copy_row(keys, new * key_width, new_keys, source * key_width, np.float32(1), key_width)
    if value_width == stride:
        values, new_values = values_of(number, step, part), pointer(number(step.new_values))
        copy_row(values, new * value_width, new_values, source * value_width, np.float32(1), value_width)


@njit(inline="always")
def start_row(
    number: Any, step: Any, table: Any, source: Any, query: Any, key_width: Any, value_width: Any, stride: Any
) -> Any:
    """Read the queries of a row and a head of keys, and write the new token to the cache. Returns the row's parts, the
    head, the number of tokens, and how many of the first ones are not seen."""
    row, count, total = table[source // step.heads], len(query) * key_width, 0
    for part in row:
        total += part.length
    queries = pointer(number(step.queries))
    copy_row(data_of(query), 0, queries, source * count, np.float32(step.scale), count)
    add_token(number, step, row[step.parts - 1], source, key_width, value_width, stride)
    return row, source % step.heads, total, max(0, total - step.window) if step.window else 0


@njit(inline="always")
def to_probabilities(scores: Any, first: Any, unseen: Any, total: Any, like: Any, probs: Any) -> None:
    """The scores from `first` to `total` to probabilities, which may be in their place: 0 before `unseen`."""
    group, line = scores.shape
    end = first + (total - first + LINE - 1) // LINE * LINE
    for g in range(group):
        fill(data_of(scores), g * line + first, g * line + unseen, np.float32(-np.inf))
        fill(data_of(scores), g * line + total, g * line + end, np.float32(-np.inf))
        softmax_row(data_of(scores), g * line + first, end - first, like, data_of(probs))


@njit(inline="always")
def weigh_part_in_pairs(
    output: Any, values: Any, start: Any, following: Any, probs: Any, at: Any, rest: Any, count: Any, width: Any,
    stride: Any,
) -> None:  # fmt: skip
    """`weigh_pairs` of all outputs; `rest` of them fill no tile."""
    line, whole, outputs, lines = probs.shape[1], len(output) - rest, data_of(output), data_of(probs)
    for g in range(0, whole, HALF_ROWS):
        weigh_pairs(outputs, values, start, following, lines, at, line, g, HALF_ROWS, count, width, stride)
    weigh_pairs(outputs, values, start, following, lines, at, line, whole, rest, count, width, stride)


@njit(inline="always")
def to_next_part(step: Any, row: Any, place: Any, head: Any, stride: Any) -> Any:
    """Numbers from the last value of a part to the first one of the next part with tokens; 0 where there is none."""
    part = row[place]
    for later in range(place + 1, len(row)):
        other = row[later]
        if other.length:
            apart = (other.values - part.values + step.layer * (other.value_layer - part.value_layer)) // 2
            return apart + (head * other.capacity - head * part.capacity - part.length + 1) * stride
    return 0


def weigh_row(
    output: Any, number: Any, step: Any, row: Any, head: Any, probs: Any, first: Any, rest: Any, width: Any,
    stride: Any,
) -> None:  # fmt: skip
    """output[g] = sum of probs[g, k] times value k of all parts for k from `first` on, which is even; `rest` of them
    fill no tile."""


@overload(weigh_row, prefer_literal=True)
def _weigh_row(output, number, step, row, head, probs, first, rest, width, stride):
    def whole(output, number, step, row, head, probs, first, rest, width, stride):
        output[:] = 0
        before = 0
        for part in row:
            start, own = head * part.capacity * stride, min(max(0, first - before), part.length)
            weigh_part(output, values_of(number, step, part), start, own, part.length, probs, before, rest, width,
                       stride)  # fmt: skip
            before += part.length

    def in_pairs(output, number, step, row, head, probs, first, rest, width, stride):
        output[:] = 0
        at, before = first, 0
        for place in range(len(row)):
            part = row[place]
            own, start, values = max(0, at - before), head * part.capacity * stride, values_of(number, step, part)
            pairs = max(0, part.length - own) // 2
            weigh_part_in_pairs(output, values, start + own * stride, stride, probs, at, rest, pairs, width, stride)
            at += 2 * pairs
            before += part.length
            if at < before:  # the last token of this part is paired with the first one of the next
                start += (part.length - 1) * stride
                weigh_part_in_pairs(output, values, start, to_next_part(step, row, place, head, stride), probs, at,
                                    rest, 1, width, stride)  # fmt: skip
                at += 2

    return in_pairs if probs.dtype == types.uint16 else whole


@cache
def attention_function(kind: str, group: int, key_width: int, value_width: int, value_stride: int) -> Any:
    """A C function of a pointer to a STEP, which lives as long as this object, for an `instructions.Kind`, `group`
    queries of a key head and tokens of these widths, which are constants in its machine code. Each token's values are
    `value_stride` numbers after the last one's, more than their width if they are parts of its key."""
    in_pairs = kind == "pairs" and not key_width % WIDTH_OF_PAIRS and not value_width % WIDTH_OF_PAIRS
    number, dtype = numbers_of("bfloat16" if kind == "pairs" and not in_pairs else kind)
    score_rest, ahead = group % SCORE_ROWS, BLOCK * key_width
    weigh_rest = group % (HALF_ROWS if in_pairs else TILE_QUERIES)

    @c_function
    def attend(argument):
        step = carray(argument, 1, STEP)[0]
        outputs, table = pointer(number(step.outputs)), carray(void_pointer(step.table), (step.rows, step.parts), PART)
        query, output = np.empty((group, key_width), dtype), np.empty((group, value_width), np.float32)
        scores, probs = np.empty((group, step.line), np.float32), np.empty((group, step.line), dtype)
        panel = np.empty(key_width * TILE_COLUMNS, dtype)
        source = atomic_next(argument)
        while source < step.rows * step.heads:
            row, head, total, unseen = start_row(
                number, step, table, source, query, key_width, value_width, value_stride
            )
            before = 0
            for part in row:
                first = min(max(0, unseen - before), part.length)
                score_part(query, keys_of(number, step, part), head * part.capacity * key_width, first, part.length,
                           scores, before, panel, score_rest, key_width, ahead)  # fmt: skip
                before += part.length
            first = unseen - unseen % 2
            to_probabilities(scores, first, unseen, total, outputs, probs)
            weigh_row(output, number, step, row, head, probs, first, weigh_rest, value_width, value_stride)
            copy_row(outputs, source * group * value_width, data_of(output), 0, np.float32(1), group * value_width)
            source = atomic_next(argument)

    return attend


LAYER = np.dtype(
    [
        ("norm", "i8"),  # address of the weight of the norm before attention
        ("norm_eps", "f8"),
        ("inputs", "i8"),  # address of `projections.CALL` of queries, keys and values
        ("input_threads", "i8"),
        ("query_norm", "i8"),  # address of the weight of the norm of a head of queries, or 0
        ("query_eps", "f8"),
        ("key_norm", "i8"),
        ("key_eps", "f8"),
        ("attention", "i8"),  # address of STEP
        ("attend", "i8"),  # `attention_function`
        ("output", "i8"),  # address of the CALL of attention's output
        ("output_threads", "i8"),
        ("mlp_norm", "i8"),
        ("mlp_eps", "f8"),
        ("gates", "i8"),  # address of the CALL of gate and up
        ("gate_threads", "i8"),
        ("down", "i8"),
        ("down_threads", "i8"),
    ]
)
"""A layer: x + attention(norm(x)), then x + down(silu(gate) up) of norm(x)."""
LAYERS = np.dtype(
    [
        ("count", "i8"),
        ("table", "i8"),  # address of LAYER [count]
        ("rows", "i8"),
        ("width", "i8"),
        ("heads", "i8"),
        ("key_heads", "i8"),
        ("head_width", "i8"),
        ("mlp_width", "i8"),
        ("residual", "i8"),  # address of float32 [rows, width]: what comes into the layers
        ("total", "i8"),  # of the same: what comes out of them, without the last addition
        ("normed", "i8"),  # [rows, width]
        ("scales", "i8"),  # float32 [rows]
        ("query", "i8"),  # [rows, heads head_width], and rotated
        ("rotated_query", "i8"),
        ("key", "i8"),
        ("rotated_key", "i8"),
        ("value", "i8"),
        ("attended", "i8"),  # [rows, heads head_width]
        ("gate", "i8"),  # [rows, mlp_width]
        ("up", "i8"),
        ("gated", "i8"),
        ("addition", "i8"),  # [rows, width]: what attention and MLP add
        ("project", "i8"),  # `projections.forward_function`
        ("parallel", "i8"),  # `openmp.address_of_parallel`
        ("rotary", "i8"),  # numbers of a head that are rotated
        ("cos", "i8"),  # [rows, rotary]
        ("sin", "i8"),
        ("attention_threads", "i8"),
    ]
)
"""What `layers_function` gets a pointer to: tensors of one step, of which each layer overwrites the last one's."""


@njit(inline="always")
def run_call(parallel: Any, function: Any, argument: Any, threads: Any) -> None:
    """Call a function with a table that begins with the part to compute next."""
    carray(void_pointer(argument), 1, np.int64)[0] = 0
    if parallel and threads > 1:
        run_threads(parallel, function, argument, threads)
    else:
        run_alone(function, argument)


@njit(inline="always")
def rotate_heads(number: Any, step: Any, heads: Any, rotated: Any, count: Any, weight: Any, eps: Any) -> None:
    """Rotate the heads of all rows, which are normed if there is a weight."""
    width, rotary = step.head_width, step.rotary
    tensors = number(heads), number(step.cos), number(step.sin), number(rotated)
    sizes = count * width, width, count, width, rotary
    if weight:
        norm_rotate_rows(0, step.rows, *tensors, *sizes, number(weight), eps)
    else:
        rotate_rows(0, step.rows, *tensors, *sizes, 1.0)


@cache
def layers_function(kind: str) -> Any:
    """A C function of a pointer to LAYERS, which lives as long as this object: computes all layers of a decoding step.
    The caller adds the last addition to the total."""
    number, _ = numbers_of(kind)

    @c_function
    def run_layers(argument):
        step = carray(argument, 1, LAYERS)[0]
        rows, width, parallel, project = step.rows, step.width, step.parallel, step.project
        residual, total = np.float64(step.residual), np.float64(step.total)
        normed, scales, addition = number(step.normed), np.float64(step.scales), number(step.addition)
        is_first = True
        for layer in carray(void_pointer(step.table), step.count, LAYER):
            weight = number(layer.norm)
            if is_first:
                norm_rows(0, rows, residual, weight, normed, scales, width, layer.norm_eps)
            else:
                add_norm_rows(0, rows, residual, addition, total, weight, normed, scales, width, layer.norm_eps)
                residual, total = total, residual
            is_first = False
            run_call(parallel, project, layer.inputs, layer.input_threads)
            rotate_heads(number, step, step.query, step.rotated_query, step.heads, layer.query_norm, layer.query_eps)
            rotate_heads(number, step, step.key, step.rotated_key, step.key_heads, layer.key_norm, layer.key_eps)
            run_call(parallel, layer.attend, layer.attention, step.attention_threads)
            run_call(parallel, project, layer.output, layer.output_threads)
            weight = number(layer.mlp_norm)
            add_norm_rows(0, rows, residual, addition, total, weight, normed, scales, width, layer.mlp_eps)
            residual, total = total, residual
            run_call(parallel, project, layer.gates, layer.gate_threads)
            silu_mul_numbers(0, rows * step.mlp_width, number(step.gate), number(step.up), number(step.gated))
            run_call(parallel, project, layer.down, layer.down_threads)

    return run_layers
