"""Vectors of float32 numbers in LLVM's instructions, for intrinsics of Numba: of bfloat16 numbers as of float32 ones.

LLVM's own vectorizer leaves loops as they are where a maximum is taken, and its sums cost more than their products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from llvmlite import binding, ir
from numba import config
from numba.extending import intrinsic
from typing_extensions import override

from tinsmith.engine.cpu.primitives import BITS, EXP_COEFFICIENTS

FLOAT, DOUBLE, INT64 = ir.FloatType(), ir.DoubleType(), ir.IntType(64)


def _has(feature: str) -> bool:
    """Whether Numba compiles for these instructions: $NUMBA_CPU_FEATURES may leave out what the processor has."""
    if config.CPU_FEATURES is not None:
        return f"+{feature}" in config.CPU_FEATURES
    return bool(binding.get_host_cpu_features().get(feature, False))


HAS_32_REGISTERS = _has("avx512f")
HAS_PAIRS = _has("avx512bf16")
"""Whether `add_pairs` can be compiled."""
HAS_AMX = HAS_PAIRS and _has("amx-bf16")
"""Whether products in AMX's tiles can be compiled."""
LANES = 16 if HAS_32_REGISTERS else 8
"""Numbers in a vector, at most."""
PART = 2.0**-37
"""What terms of sums that have no order are multiples of."""
of_constants: Callable[[Callable[..., Any]], Any] = cast("Any", intrinsic)(prefer_literal=True)
"""An intrinsic of which some arguments are constants."""


def lanes_in(width: int) -> int:
    """The largest power of 2 that divides a width, up to LANES."""
    return min(LANES, width & -width)


def index(builder: Any, start: Any, offset: int) -> Any:
    """start + offset."""
    return builder.add(start, INT64(offset))


def read(builder: Any, pointer: Any, at: Any, lanes: int = LANES) -> Any:
    """A vector of float32 from float32 or bfloat16 numbers."""
    numbers = builder.load(_vector_at(builder, pointer, at, lanes), align=_alignment(pointer))
    if pointer.type.pointee == FLOAT:
        return numbers
    bits = builder.shl(builder.zext(numbers, _bits(lanes)), _whole(16, lanes))
    return builder.bitcast(bits, ir.VectorType(FLOAT, lanes))


def write(builder: Any, pointer: Any, at: Any, vector: Any) -> None:
    """Store a vector as float32 or bfloat16 numbers."""
    lanes = vector.type.count
    if pointer.type.pointee != FLOAT:
        upper = builder.lshr(_rounded_bits(builder, vector), _whole(16, lanes))
        vector = builder.trunc(upper, ir.VectorType(ir.IntType(16), lanes))
    builder.store(vector, _vector_at(builder, pointer, at, lanes), align=_alignment(pointer))


def rounded(builder: Any, vector: Any, pointer: Any) -> Any:
    """A vector as it would be read after it was stored at a pointer."""
    if pointer.type.pointee == FLOAT:
        return vector
    upper = builder.and_(_rounded_bits(builder, vector), _whole(0xFFFF0000, vector.type.count))
    return builder.bitcast(upper, vector.type)


def broadcast(builder: Any, number: Any, lanes: int = LANES) -> Any:
    """A vector of a float32."""
    first = builder.insert_element(ir.Constant(ir.VectorType(FLOAT, lanes), ir.Undefined), number, BITS(0))
    return builder.shuffle_vector(first, first, _whole(0, lanes))


def constant(number: float, lanes: int = LANES) -> Any:
    """A vector of one number."""
    return ir.Constant(ir.VectorType(FLOAT, lanes), [number] * lanes)


def fma(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """left * right + total, rounded once."""
    return builder.fadd(builder.fmul(left, right, flags=("contract",)), total, flags=("contract",))


def larger(builder: Any, left: Any, right: Any) -> Any:
    """The larger of two numbers or vectors; the left one where the right one is NaN."""
    return builder.select(builder.fcmp_ordered(">", right, left), right, left)


def folded(builder: Any, vector: Any, operation: Callable[[Any, Any], Any]) -> Any:
    """The sum or the like of a vector, half by half."""
    while (lanes := vector.type.count) > 1:
        halves = (
            ir.Constant(ir.VectorType(BITS, lanes // 2), list(range(start, start + lanes // 2)))
            for start in (0, lanes // 2)
        )
        vector = operation(*(builder.shuffle_vector(vector, vector, half) for half in halves))
    return builder.extract_element(vector, BITS(0))


def exponential(builder: Any, vector: Any) -> Any:
    """e^x, as `primitives.exp` computes it; NaN for NaN."""
    log2, shift, upper, lower, *coefficients = map(float, EXP_COEFFICIENTS)
    vector = larger(builder, vector, constant(-87.0))
    vector = builder.select(builder.fcmp_ordered(">", vector, constant(87.0)), constant(87.0), vector)
    shifted = fma(builder, vector, constant(log2), constant(shift))
    whole = builder.fsub(shifted, constant(shift))
    rest = fma(builder, whole, constant(lower), fma(builder, whole, constant(upper), vector))
    power = constant(coefficients[0])
    for coefficient in coefficients[1:]:
        power = fma(builder, power, rest, constant(coefficient))
    power = builder.fadd(fma(builder, builder.fmul(power, rest), rest, rest), constant(1.0))
    exponent = builder.shl(builder.bitcast(shifted, _bits(LANES)), _whole(23, LANES))
    scale = builder.bitcast(builder.add(exponent, _whole(0x3F800000, LANES)), vector.type)
    return builder.fmul(power, scale)


def whole_parts(builder: Any, vector: Any) -> Any:
    """Numbers from 0 to 1 as doubles, rounded to multiples of PART: doubles represent sums of these up to 2^16, so that
    the sums do not depend on their order."""
    wide = builder.fpext(vector, ir.VectorType(DOUBLE, vector.type.count))
    shift = ir.Constant(wide.type, [1.5 * 2.0**52 * PART] * vector.type.count)  # the last bit of what is added to it
    return builder.fsub(builder.fadd(wide, shift), shift)


def no_parts(lanes: int) -> Any:
    """A vector of zeros as `whole_parts` returns it."""
    return ir.Constant(ir.VectorType(DOUBLE, lanes), [0.0] * lanes)


def shuffled(builder: Any, left: Any, right: Any, places: Sequence[int]) -> Any:
    """The numbers of two vectors at these places of both."""
    return builder.shuffle_vector(left, right, ir.Constant(_bits(len(places)), list(places)))


def transposed(builder: Any, vectors: Sequence[Any]) -> list[Any]:
    """n vectors of n numbers, of which the i-th has the i-th number of each; n is a power of 2."""
    vectors, count = list(vectors), len(vectors)
    step = count // 2
    while step:  # blocks of step x step numbers change places
        for i in (i for i in range(count) if not i & step):
            pair = vectors[i], vectors[i + step]
            for vector, shift in ((i, 0), (i + step, step)):
                sources = [(at & ~step) + shift + (count if at & step else 0) for at in range(count)]
                vectors[vector] = shuffled(builder, *pair, sources)
        step //= 2
    return vectors


def bits_at(builder: Any, pointer: Any, at: Any, count: int) -> Any:
    """`count` bfloat16 numbers as they are."""
    vector = ir.VectorType(ir.IntType(16), count)
    return builder.load(builder.bitcast(builder.gep(pointer, [at]), vector.as_pointer()), align=2)


def put_bits(builder: Any, pointer: Any, at: Any, vector: Any) -> None:
    """Store a vector's bits from a bfloat16 number on."""
    builder.store(vector, builder.bitcast(builder.gep(pointer, [at]), vector.type.as_pointer()), align=2)


def words_at(builder: Any, pointer: Any, at: Any) -> list[Any]:
    """Two vectors of float32 from bfloat16 numbers: word i has the i-th of the first in its lower half, that of the
    second in its upper half."""
    words = builder.bitcast(bits_at(builder, pointer, at, 2 * LANES), _bits(LANES))
    halves = builder.shl(words, _whole(16, LANES)), builder.and_(words, _whole(0xFFFF0000, LANES))
    return [builder.bitcast(half, ir.VectorType(FLOAT, LANES)) for half in halves]


def put_words(builder: Any, pointer: Any, at: Any, first: Any, second: Any) -> Any:
    """Store two vectors of float32 as `words_at` reads them. Returns the bits of all numbers that bfloat16 lacks."""
    lower, upper = (builder.bitcast(vector, _bits(LANES)) for vector in (first, second))
    words = builder.or_(builder.lshr(lower, _whole(16, LANES)), builder.and_(upper, _whole(0xFFFF0000, LANES)))
    put_bits(builder, pointer, at, words)
    rest = builder.and_(builder.or_(lower, upper), _whole(0xFFFF, LANES))
    return folded(builder, rest, builder.or_)


def halves_at(builder: Any, pointer: Any, at: Any) -> Any:
    """A vector of float32 from float16 numbers."""
    halves = builder.bitcast(bits_at(builder, pointer, at, LANES), _HALVES)
    return builder.fpext(halves, ir.VectorType(FLOAT, LANES))


def put_halves(builder: Any, pointer: Any, at: Any, vector: Any) -> Any:
    """Store a vector of float32 as float16 numbers. Returns the bits of all numbers that change by this."""
    halves = builder.fptrunc(vector, _HALVES)
    put_bits(builder, pointer, at, builder.bitcast(halves, ir.VectorType(ir.IntType(16), LANES)))
    before, after = (builder.bitcast(each, _bits(LANES)) for each in (vector, builder.fpext(halves, vector.type)))
    return folded(builder, builder.xor(before, after), builder.or_)


def pairs_at(builder: Any, pointer: Any, at: Any) -> Any:
    """32 bfloat16 numbers."""
    return as_pairs(builder, bits_at(builder, pointer, at, 32))


def as_pairs(builder: Any, bits: Any) -> Any:
    """The bits of 32 bfloat16 numbers as an argument of `add_pairs`."""
    return builder.bitcast(bits, _PAIRS)


def pair_at(builder: Any, pointer: Any, at: Any) -> Any:
    """Two bfloat16 numbers, 16 times."""
    pair = builder.load(builder.bitcast(builder.gep(pointer, [at]), BITS.as_pointer()), align=2)
    first = builder.insert_element(ir.Constant(_bits(16), ir.Undefined), pair, BITS(0))
    return builder.bitcast(builder.shuffle_vector(first, first, _whole(0, 16)), _PAIRS)


def add_pairs(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """total + the products of both numbers of each of 16 pairs of bfloat16 numbers, in float32."""
    vector = ir.VectorType(FLOAT, 16)
    signature = ir.FunctionType(vector, [vector, _PAIRS, _PAIRS])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return builder.call(builder.module.declare_intrinsic(name, (), signature), [total, left, right])


def bring_nearer(builder: Any, pointer: Any, at: Any, ahead: int, count: int, level: int) -> None:
    """Bring `count` numbers that are `ahead` bytes after one into the core's first cache (`level` 0) or second (1)."""
    byte, size = ir.IntType(8).as_pointer(), 4 if pointer.type.pointee == FLOAT else 2
    signature = ir.FunctionType(ir.VoidType(), [byte, BITS, BITS, BITS])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], signature)
    first = builder.bitcast(builder.gep(pointer, [at]), byte)
    for line in range(ahead, ahead + count * size, 64):  # data to be read
        builder.call(function, [builder.gep(first, [INT64(line)]), BITS(0), BITS(3 - level), BITS(1)])


def loop(
    builder: Any, count: Any, step: int, start: Sequence[Any], body: Callable[[Any, Sequence[Any]], Sequence[Any]]
) -> Sequence[Any]:
    """Call `body` with 0, step, ... below `count`, and with what it returned before, `start` at first; returns the
    last of these."""
    before, head = builder.block, builder.append_basic_block("head")
    inside, after = builder.append_basic_block("inside"), builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    at, *carried = (builder.phi(value.type) for value in (INT64(0), *start))
    builder.cbranch(builder.icmp_signed("<", at, count), inside, after)
    builder.position_at_end(inside)
    results = body(at, carried)
    following = index(builder, at, step)
    for phi, first, value in zip((at, *carried), (INT64(0), *start), (following, *results), strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return carried


class _BFloat(ir.types.Type):
    """LLVM's type of a bfloat16, which llvmlite lacks."""

    @override
    def __str__(self) -> str:
        return "bfloat"

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    @override
    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 32)
_HALVES = ir.VectorType(ir.HalfType(), LANES)


def _vector_at(builder: Any, pointer: Any, at: Any, lanes: int) -> Any:
    place = builder.gep(pointer, [at])
    return builder.bitcast(place, ir.VectorType(pointer.type.pointee, lanes).as_pointer())


def _alignment(pointer: Any) -> int:
    return 4 if pointer.type.pointee == FLOAT else 2


def _bits(lanes: int) -> Any:
    return ir.VectorType(BITS, lanes)


def _whole(number: int, lanes: int) -> Any:
    return ir.Constant(_bits(lanes), [number] * lanes)


def _rounded_bits(builder: Any, vector: Any) -> Any:
    """The bits of a vector, the upper half of each rounded to nearest and to even: that of a bfloat16."""
    lanes = vector.type.count
    bits = builder.bitcast(vector, _bits(lanes))
    odd = builder.and_(builder.lshr(bits, _whole(16, lanes)), _whole(1, lanes))
    up = builder.add(builder.add(bits, _whole(0x7FFF, lanes)), odd)
    return builder.select(builder.fcmp_ordered("ord", vector, vector), up, _whole(0x7FC00000, lanes))
