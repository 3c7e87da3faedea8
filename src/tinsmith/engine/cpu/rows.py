"""Rows of float32 numbers in memory, for loops of attention: read, written, masked, and their softmax both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from tinsmith.engine.cpu.primitives import load, rounded, store
from tinsmith.engine.cpu.vectors import (
    FLOAT,
    INT64,
    LANES,
    broadcast,
    constant,
    exponential,
    fma,
    folded,
    larger,
    loop,
    no_parts,
    put_words,
    read,
    shuffled,
    whole_parts,
    write,
)
from tinsmith.engine.cpu.vectors import rounded as rounded_vector


@njit(inline="always")
def copy_row(target: Any, at: Any, source: Any, start: Any, factor: Any, count: Any) -> None:
    """Copy `count` numbers times a factor, rounded to the dtypes of both."""
    whole = count - count % LANES
    _copy_vectors(target, at, source, start, factor, whole)
    for i in range(whole, count):
        store(target, at + i, rounded(source, load(source, start + i) * factor))


@njit(inline="always")
def add_row(target: Any, at: Any, source: Any, start: Any, count: Any) -> None:
    """Add `count` float32 to others."""
    for i in range(count):
        store(target, at + i, load(target, at + i) + load(source, start + i))


@njit(inline="always")
def fill(numbers: Any, first: Any, last: Any, number: Any) -> None:
    """Fill numbers from first to last."""
    for i in range(first, last):
        store(numbers, i, number)


@njit(inline="always")
def mask_row(numbers: Any, at: Any, visible: Any, first: Any, count: Any) -> None:
    """Put -inf where what is visible is False."""
    whole = count - count % LANES
    _mask_vectors(numbers, at, visible, first, whole)
    for i in range(whole, count):
        if not visible[first + i]:
            store(numbers, at + i, np.float32(-np.inf))


@intrinsic
def softmax_row(context: Any, numbers: Any, at: Any, count: Any, like: Any, target: Any) -> Any:
    """The softmax of `count` float32, a multiple of LANES, both rounded to the dtype of a pointer, stored at the same
    place of a target, which may be the numbers. A target of bfloat16 gets the second number of each pair before the
    first one, as `panels.lay_in_order` has it.

    All results are NaN if any number is. They do not depend on where the numbers are in the row, nor on how many of
    them are -inf.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers, at, count, like, target = arguments

        def largest(i: Any, carried: Any) -> Any:
            vector = rounded_vector(builder, read(builder, numbers, builder.add(at, i)), like)
            write(builder, numbers, builder.add(at, i), vector)
            return [larger(builder, carried[0], vector)]

        def exponentials(i: Any, carried: Any) -> Any:
            vector = exponential(builder, builder.fsub(read(builder, numbers, builder.add(at, i)), most))
            write(builder, numbers, builder.add(at, i), vector)
            return [builder.fadd(carried[0], whole_parts(builder, vector))]

        def divided(i: Any, carried: Any) -> Any:
            vector = builder.fmul(read(builder, numbers, builder.add(at, i)), inverse)
            if target.type.pointee == FLOAT:
                write(builder, target, builder.add(at, i), rounded_vector(builder, vector, like))
            else:
                swapped = shuffled(builder, vector, vector, [place ^ 1 for place in range(LANES)])
                write(builder, target, builder.add(at, i), swapped)
            return carried

        (most,) = loop(builder, count, LANES, [constant(float("-inf"))], largest)
        most = broadcast(builder, folded(builder, most, lambda left, right: larger(builder, left, right)))
        (parts,) = loop(builder, count, LANES, [no_parts(LANES)], exponentials)
        total = builder.fptrunc(folded(builder, parts, builder.fadd), FLOAT)
        inverse = broadcast(builder, builder.fdiv(FLOAT(1.0), total))
        loop(builder, count, LANES, [], divided)
        return context.get_dummy_value()

    return types.void(numbers, types.int64, types.int64, like, target), generate


@intrinsic
def pair_float_rows(
    context: Any, target: Any, place: Any, numbers: Any, first: Any, second: Any, count: Any
) -> Any:  # fmt: skip
    """target[place + 2 c] and the next are numbers[first + c] and numbers[second + c], which are float32 that bfloat16
    represents, of `count` columns, a multiple of LANES."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, place, numbers, first, second, count = arguments

        def body(c: Any, carried: Any) -> Any:
            left, right = (read(builder, numbers, builder.add(row, c)) for row in (first, second))
            put_words(builder, target, builder.add(place, builder.shl(c, INT64(1))), left, right)
            return carried

        loop(builder, count, LANES, [], body)
        return context.get_dummy_value()

    return types.void(target, types.int64, numbers, types.int64, types.int64, types.int64), generate


@intrinsic
def softmax_backward_row(context: Any, grads: Any, at: Any, probs: Any, place: Any, count: Any) -> Any:
    """Gradients of scores from those of probabilities, `count` float32, a multiple of LANES, in place."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        grads, at, probs, place, count = arguments

        def pair(i: Any) -> tuple[Any, Any]:
            return read(builder, grads, builder.add(at, i)), read(builder, probs, builder.add(place, i))

        def weighted(i: Any, carried: Any) -> Any:
            grad, prob = pair(i)
            return [fma(builder, grad, prob, carried[0])]

        def differences(i: Any, carried: Any) -> Any:
            grad, prob = pair(i)
            write(builder, grads, builder.add(at, i), builder.fmul(prob, builder.fsub(grad, mean)))
            return carried

        (total,) = loop(builder, count, LANES, [constant(0.0)], weighted)
        mean = broadcast(builder, folded(builder, total, builder.fadd))
        loop(builder, count, LANES, [], differences)
        return context.get_dummy_value()

    return types.void(grads, types.int64, probs, types.int64, types.int64), generate


@intrinsic
def _copy_vectors(context: Any, target: Any, at: Any, source: Any, start: Any, factor: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, at, source, start, factor, count = arguments
        factors = broadcast(builder, factor)

        def body(i: Any, carried: Any) -> Any:
            vector = builder.fmul(read(builder, source, builder.add(start, i)), factors)
            write(builder, target, builder.add(at, i), rounded_vector(builder, vector, source))
            return carried

        loop(builder, count, LANES, [], body)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.float32, types.int64), generate


@intrinsic
def _mask_vectors(context: Any, numbers: Any, at: Any, visible: Any, first: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers, at, visible, first, count = arguments
        flags = ir.VectorType(ir.IntType(8), LANES)

        def body(i: Any, carried: Any) -> Any:
            place = builder.gep(visible, [builder.add(first, i)])
            seen = builder.load(builder.bitcast(place, flags.as_pointer()), align=1)
            is_seen = builder.icmp_unsigned("!=", seen, ir.Constant(flags, [0] * LANES))
            scores = read(builder, numbers, builder.add(at, i))
            write(builder, numbers, builder.add(at, i), builder.select(is_seen, scores, constant(float("-inf"))))
            return carried

        loop(builder, count, LANES, [], body)
        return context.get_dummy_value()

    return types.void(numbers, types.int64, visible, types.int64, types.int64), generate
