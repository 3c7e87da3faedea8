"""Products of a few queries with a few keys or values as vector instructions, for loops of attention.

LLVM's own vectorizer reads keys once for each query, and its sums cost more than their products. A tile is a number of
queries by a number of keys or values, both constants, whose sums stay in registers. Widths are constants too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from tinsmith.engine.cpu.primitives import BITS

FLOAT, INT64 = ir.FloatType(), ir.IntType(64)
_HAS_32_REGISTERS = binding.get_host_cpu_features().get("avx512f", False)
LANES = 16 if _HAS_32_REGISTERS else 8
"""Numbers in a vector, at most."""
TILE_QUERIES = 4 if _HAS_32_REGISTERS else 2
TILE_KEYS = 4
TILE_VALUES = 8
"""Sizes of the largest tiles, so that all of a tile is in registers."""
of_constants: Callable[[Callable[..., Any]], Any] = cast("Any", intrinsic)(prefer_literal=True)
"""An intrinsic of which some arguments are constants."""


@intrinsic
def data_of(context: Any, array: Any) -> Any:
    """A pointer to the numbers of an array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    return types.CPointer(array.dtype)(array), generate


@of_constants
def score_tile(
    context: Any, queries: Any, keys: Any, at: Any, scores: Any, place: Any, line: Any, first: Any,
    rows: Any, count: Any, width: Any,
) -> Any:  # fmt: skip
    """scores[g line + place + k] = queries[g] . keys[at + k width], of `rows` queries from `first` on, `count` keys."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        queries, keys, at, scores, place, line, first, *_ = arguments
        lanes = _lanes(width.literal_value)
        own = builder.mul(first, INT64(width.literal_value))
        zero = ir.Constant(ir.VectorType(FLOAT, lanes), [0.0] * lanes)
        sums = [[zero] * count.literal_value for _ in range(rows.literal_value)]
        for i in range(0, width.literal_value, lanes):
            offsets = [_index(builder, at, k * width.literal_value + i) for k in range(count.literal_value)]
            vectors = [_read(builder, keys, offset, lanes) for offset in offsets]
            for g, line_sums in enumerate(sums):
                query = _read(builder, queries, _index(builder, own, g * width.literal_value + i), lanes)
                sums[g] = [_fma(builder, query, *pair) for pair in zip(vectors, line_sums, strict=True)]
        for g, line_sums in enumerate(sums):
            start = builder.add(place, builder.mul(line, _index(builder, first, g)))
            for k, vector in enumerate(line_sums):
                builder.store(_sum(builder, vector), builder.gep(scores, [_index(builder, start, k)]))
        return context.get_dummy_value()

    whole = types.int64
    return types.void(queries, keys, whole, scores, whole, whole, whole, rows, count, width), generate


@of_constants
def weigh_tile(
    context: Any, outputs: Any, values: Any, at: Any, probs: Any, place: Any, line: Any, first: Any,
    rows: Any, count: Any, width: Any, stride: Any,
) -> Any:  # fmt: skip
    """outputs[g] += sum of probs[g line + place + k] values[at + k stride], of `rows` outputs from `first` on,
    `count` values."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        outputs, values, at, probs, place, line, first, *_ = arguments
        lanes = _lanes(width.literal_value)
        own = builder.mul(first, INT64(width.literal_value))
        lines = (builder.mul(line, _index(builder, first, g)) for g in range(rows.literal_value))
        starts = [builder.add(place, start) for start in lines]
        weights = [
            [_broadcast(builder, probs, _index(builder, start, k), lanes) for k in range(count.literal_value)]
            for start in starts
        ]
        for i in range(0, width.literal_value, lanes):
            places = [_index(builder, own, g * width.literal_value + i) for g in range(rows.literal_value)]
            sums = [_read(builder, outputs, place, lanes) for place in places]
            for k in range(count.literal_value):
                vector = _read(builder, values, _index(builder, at, k * stride.literal_value + i), lanes)
                sums = [_fma(builder, vector, weights[g][k], total) for g, total in enumerate(sums)]
            for place, total in zip(places, sums, strict=True):
                builder.store(total, _vector_at(builder, outputs, place, lanes), align=4)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(outputs, values, whole, probs, whole, whole, whole, rows, count, width, stride), generate


@of_constants
def prefetch(context: Any, numbers: Any, at: Any, count: Any) -> Any:
    """Bring `count` numbers into the second cache of the core."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        signature = ir.FunctionType(ir.VoidType(), [byte, BITS, BITS, BITS])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], signature)
        first = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), byte)
        for line in range(0, count.literal_value * numbers.dtype.bitwidth // 8, 64):
            # of data to be read, into the second level
            builder.call(function, [builder.gep(first, [INT64(line)]), BITS(0), BITS(2), BITS(1)])
        return context.get_dummy_value()

    return types.void(numbers, types.int64, count), generate


def _lanes(width: int) -> int:
    """The largest power of 2 that divides a width, up to LANES."""
    return min(LANES, width & -width)


def _index(builder: Any, start: Any, offset: int) -> Any:
    return builder.add(start, INT64(offset))


def _vector_at(builder: Any, pointer: Any, index: Any, lanes: int) -> Any:
    place = builder.gep(pointer, [index])
    return builder.bitcast(place, ir.VectorType(pointer.type.pointee, lanes).as_pointer())


def _read(builder: Any, pointer: Any, index: Any, lanes: int) -> Any:
    """A vector of float32 from float32 or bfloat16 numbers."""
    is_float32 = pointer.type.pointee == FLOAT
    numbers = builder.load(_vector_at(builder, pointer, index, lanes), align=4 if is_float32 else 2)
    if is_float32:
        return numbers
    wide = ir.VectorType(BITS, lanes)
    upper = builder.shl(builder.zext(numbers, wide), ir.Constant(wide, [16] * lanes))
    return builder.bitcast(upper, ir.VectorType(FLOAT, lanes))


def _broadcast(builder: Any, pointer: Any, index: Any, lanes: int) -> Any:
    """A vector of a float32."""
    vector = ir.VectorType(FLOAT, lanes)
    number = builder.load(builder.gep(pointer, [index]))
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), number, BITS(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(BITS, lanes), [0] * lanes))


def _fma(builder: Any, left: Any, right: Any, total: Any) -> Any:
    return builder.fadd(builder.fmul(left, right, flags=("contract",)), total, flags=("contract",))


def _sum(builder: Any, vector: Any) -> Any:
    """The sum of a vector, half by half."""
    while (lanes := vector.type.count) > 1:
        halves = (
            ir.Constant(ir.VectorType(BITS, lanes // 2), list(range(start, start + lanes // 2)))
            for start in (0, lanes // 2)
        )
        vector = builder.fadd(*(builder.shuffle_vector(vector, vector, half) for half in halves))
    return builder.extract_element(vector, BITS(0))
