"""Products of matrices tile by tile: the sums of a tile stay in registers.

A tile is a number of rows by a number of keys, values or vectors, which are constants, as some widths are.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tinsmith.engine.cpu.primitives import BITS
from tinsmith.engine.cpu.vectors import (
    FLOAT,
    HAS_32_REGISTERS,
    HAS_AMX,
    INT64,
    LANES,
    add_pairs,
    as_pairs,
    bits_at,
    bring_nearer,
    broadcast,
    constant,
    fma,
    halves_at,
    index,
    lanes_in,
    loop,
    of_constants,
    pair_at,
    pairs_at,
    put_bits,
    put_halves,
    put_words,
    read,
    shuffled,
    transposed,
    words_at,
    write,
)

TILE_QUERIES = 4 if HAS_32_REGISTERS else 2
TILE_VALUES = 8
"""Sizes of the largest tiles of one row's cache, whose widths are constants."""
TILE_ROWS = 12 if HAS_32_REGISTERS else 6
TILE_VECTORS = 2
TILE_COLUMNS = TILE_VECTORS * LANES
"""Sizes of the tiles of matrices."""
PAIR_ROWS = 8
"""Rows of the tiles of bfloat16 matrices. Of 10 or 12 rows LLVM keeps some sums in memory."""
AMX_ROWS = 32
"""Rows that `amx_tile` multiplies at most, two registers of them."""
AMX_DEPTH = 32
"""Numbers of the depth that AMX multiplies at once."""
_AMX_LINES = 16
_WORDS = ir.VectorType(BITS, _AMX_LINES)
"""Lines of one of AMX's registers, and what each of them has: 16 pairs of bfloat16 numbers, or sums."""


@intrinsic
def data_of(context: Any, array: Any) -> Any:
    """A pointer to the numbers of an array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    return types.CPointer(array.dtype)(array), generate


@of_constants
def product_tile(
    context: Any, outputs: Any, place: Any, line: Any, left: Any, first: Any, left_line: Any, left_step: Any,
    right: Any, start: Any, right_line: Any, depth: Any, rows: Any, adds: Any,
) -> Any:  # fmt: skip
    """outputs[place + r line + c] = sum over k < `depth` of left[first + r left_line + k left_step] times
    right[start + k right_line + c], or plus the sum if it `adds`, of `rows` rows and TILE_COLUMNS columns."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        outputs, place, line, left, first, left_line, left_step, right, start, right_line, depth, *_ = arguments
        lines = [
            [index(builder, builder.add(place, builder.mul(line, INT64(r))), LANES * v) for v in range(TILE_VECTORS)]
            for r in range(rows.literal_value)
        ]
        flat = [place for line_places in lines for place in line_places]
        firsts = [builder.add(first, builder.mul(left_line, INT64(r))) for r in range(rows.literal_value)]

        def body(k: Any, sums: Any) -> Any:
            at, step = builder.add(start, builder.mul(k, right_line)), builder.mul(k, left_step)
            vectors = [read(builder, right, index(builder, at, LANES * v)) for v in range(TILE_VECTORS)]
            left_numbers = (builder.load(builder.gep(left, [builder.add(own, step)])) for own in firsts)
            factors = (broadcast(builder, number) for number in left_numbers)
            pairs = ((factor, vector) for factor in factors for vector in vectors)
            return [fma(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

        zero = constant(0.0)
        sums = loop(
            builder, depth, 1, [read(builder, outputs, at) if adds.literal_value else zero for at in flat], body
        )
        for at, total in zip(flat, sums, strict=True):
            write(builder, outputs, at, total)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(
        outputs, whole, whole, left, whole, whole, whole, right, whole, whole, whole, rows, adds
    ), generate


@of_constants
def panel_tile(
    context: Any, outputs: Any, place: Any, line: Any, left: Any, first: Any, left_line: Any, left_step: Any,
    right: Any, start: Any, right_line: Any, depth: Any, factor: Any, rows: Any, adds: Any, ahead: Any,
) -> Any:  # fmt: skip
    """outputs[place + r line + c] = `factor` times the sum over k < `depth` of left[r, k] right[k, c], or plus it if
    `adds` is not 0, of `rows` rows and TILE_COLUMNS columns. Sums are float32.

    Numbers of the left side that are float32 are at first + r left_line + k left_step, and those of the right side at
    start + k right_line + c, or there as bfloat16 numbers in words (`words_at`) or as float16 ones. If both sides are
    bfloat16, two numbers of the depth are side by side: at first + r left_line + k / 2 left_step + k % 2 and start + k
    / 2 right_line + 2 c + k % 2, and depth is even. Numbers of the right side that are `ahead` bytes after those that
    are multiplied are brought into the first cache, unless it is 0.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        outputs, place, line, *sides, factor, _, adds, _ = arguments
        flat = _places(builder, place, line, rows.literal_value)
        sums = _sums(builder, left, right, *sides, rows=rows.literal_value, ahead=ahead.literal_value)
        factors = broadcast(builder, factor)
        with builder.if_else(builder.icmp_signed("!=", adds, INT64(0))) as (adding, filling):
            with adding:
                for at, total in zip(flat, sums, strict=True):
                    write(builder, outputs, at, fma(builder, total, factors, read(builder, outputs, at)))
            with filling:
                for at, total in zip(flat, sums, strict=True):
                    write(builder, outputs, at, builder.fmul(total, factors))
        return context.get_dummy_value()

    whole = types.int64
    return types.void(
        outputs, whole, whole, left, whole, whole, whole, right, whole, whole, whole, types.float32, rows, whole, ahead
    ), generate


@of_constants
def score_tile(
    context: Any, scores: Any, place: Any, line: Any, queries: Any, first: Any, panel: Any, width: Any, rows: Any
) -> Any:
    """scores[place + r line + c] = query r . key c of `rows` queries from number `first` on, which are `width` numbers
    each, and a panel of keys."""
    side_by_side = 2 if queries.dtype == types.uint16 else 1

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, place, line, left, first, panel, *_ = arguments
        size, zero = INT64(width.literal_value), INT64(0)
        sides = left, first, size, INT64(side_by_side), panel, zero, INT64(side_by_side * TILE_COLUMNS), size
        sums = _sums(builder, queries, queries, *sides, rows=rows.literal_value, ahead=0)
        for at, total in zip(_places(builder, place, line, rows.literal_value), sums, strict=True):
            write(builder, scores, at, total)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(scores, whole, whole, queries, whole, panel, width, rows), generate


@of_constants
def amx_tile(
    context: Any, outputs: Any, place: Any, line: Any, left: Any, first: Any, left_line: Any, left_step: Any,
    right: Any, start: Any, right_line: Any, depth: Any, factor: Any, rows: Any, adds: Any, by_rows: Any, halves: Any,
    ahead: Any,
) -> Any:  # fmt: skip
    """`panel_tile` of bfloat16 numbers by AMX, between `set_up_amx` and `release_amx`: of AMX_ROWS rows or half of
    them, by `halves`, or of fewer than half if these are 0. Depth is a multiple of AMX_DEPTH. A row's numbers follow
    each other if `by_rows`, a constant as well, and else the pairs of all rows do. The sums of a row do not depend on
    the number of rows."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        outputs, place, line, *sides, factor, rows, adds, _, _, _ = arguments
        sums = _memory(builder, FLOAT, AMX_ROWS * TILE_COLUMNS)
        _add_up_by_amx(
            builder,
            sums,
            *sides,
            rows=rows,
            by_rows=bool(by_rows.literal_value),
            halves=halves.literal_value,
            ahead=ahead.literal_value,
        )
        factors, is_added = broadcast(builder, factor), builder.icmp_signed("!=", adds, INT64(0))

        def put_row(row: Any, carried: Any) -> Any:
            for v in range(TILE_VECTORS):
                total = read(builder, sums, index(builder, builder.mul(row, INT64(TILE_COLUMNS)), LANES * v))
                at = index(builder, builder.add(place, builder.mul(row, line)), LANES * v)
                before = builder.select(is_added, read(builder, outputs, at), constant(0.0))
                write(builder, outputs, at, fma(builder, total, factors, before))
            return carried

        loop(builder, rows, 1, [], put_row)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(
        outputs, whole, whole, left, whole, whole, whole, right, whole, whole, whole, types.float32, whole, whole,
        by_rows, halves, ahead,
    ), generate  # fmt: skip


def _add_up_by_amx(
    builder: Any, sums: Any, left: Any, first: Any, left_line: Any, left_step: Any, right: Any, start: Any,
    right_line: Any, depth: Any, *, rows: Any, by_rows: bool, halves: int, ahead: int,
) -> None:  # fmt: skip
    """Fill the sums of an `amx_tile`. AMX's registers 0 to 3 are the sums of each half of the rows and each vector of
    the columns, 4 and 5 the left side of each half, 6 and 7 the right side of each vector."""
    parts = [(half, v) for half in range(max(halves, 1)) for v in range(TILE_VECTORS)]
    for half, v in parts:
        _amx(builder, "tilezero", TILE_VECTORS * half + v)

    def add(k: Any, carried: Any) -> Any:
        pair = builder.ashr(k, INT64(1))
        own, at = builder.add(first, builder.mul(left_step, pair)), builder.add(start, builder.mul(right_line, pair))
        for line in range(_AMX_LINES):
            near = builder.add(at, builder.mul(right_line, INT64(line)))
            bring_nearer(builder, right, near, ahead, 2 * TILE_COLUMNS, 0)
        for half in range(max(halves, 1)):
            upper = builder.add(own, builder.mul(left_line, INT64(_AMX_LINES * half)))
            if by_rows and halves:
                _amx(builder, "tileloadd64", 4 + half, builder.gep(left, [upper]), _bytes(builder, left_line))
            elif by_rows:
                _read_few_by_amx(builder, 4, left, upper, left_line, rows)
            else:
                _read_columns_by_amx(builder, 4 + half, left, upper, left_step)
        for v in range(TILE_VECTORS):
            place = builder.gep(right, [index(builder, at, 2 * _AMX_LINES * v)])
            _amx(builder, "tileloadd64", 6 + v, place, _bytes(builder, right_line))
        for half, v in parts:
            _amx(builder, "tdpbf16ps", TILE_VECTORS * half + v, 4 + half, 6 + v)
        return carried

    loop(builder, depth, AMX_DEPTH, [], add)
    for half, v in parts:
        place = builder.gep(sums, [INT64(_AMX_LINES * (TILE_COLUMNS * half + v))])
        _amx(builder, "tilestored64", TILE_VECTORS * half + v, place, INT64(4 * TILE_COLUMNS))


def _read_few_by_amx(builder: Any, register: int, numbers: Any, at: Any, stride: Any, rows: Any) -> None:
    """Read fewer rows than a register has lines, after which memory may end. The other lines may be anything."""
    room = _memory(builder, _WORDS, _AMX_LINES)

    def copy(row: Any, carried: Any) -> Any:
        words = bits_at(builder, numbers, builder.add(at, builder.mul(stride, row)), 2 * _AMX_LINES)
        builder.store(builder.bitcast(words, _WORDS), builder.gep(room, [row]), align=4)
        return carried

    loop(builder, rows, 1, [], copy)
    _amx(builder, "tileloadd64", register, room, INT64(4 * _AMX_LINES))


def _read_columns_by_amx(builder: Any, register: int, numbers: Any, at: Any, stride: Any) -> None:
    """Read rows whose pairs are columns of memory: a pair of each row from `at` on, the next after `stride`."""
    room, places = _memory(builder, _WORDS, _AMX_LINES), (builder.mul(stride, INT64(k)) for k in range(_AMX_LINES))
    pairs = [bits_at(builder, numbers, builder.add(at, place), 2 * _AMX_LINES) for place in places]
    for row, words in enumerate(transposed(builder, [builder.bitcast(pair, _WORDS) for pair in pairs])):
        builder.store(words, builder.gep(room, [INT64(row)]), align=4)
    _amx(builder, "tileloadd64", register, room, INT64(4 * _AMX_LINES))


@intrinsic
def set_up_amx(context: Any, factors: Any) -> Any:
    """Let this thread multiply factors of a NumPy type by AMX, until `release_amx`: bfloat16 ones, where there is AMX.
    For others nothing is done: Linux ends a process that uses AMX before `instructions.has_pair_products` says so."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if HAS_AMX and factors.dtype == types.uint16:
            byte = ir.IntType(8)
            sizes = b"".join(size.to_bytes(2, "little") for size in [4 * _AMX_LINES] * 8)  # bytes of a line
            layout = bytes([1, *[0] * 15]) + sizes + bytes(16) + bytes([_AMX_LINES] * 8) + bytes(8)
            table = _memory(builder, byte, len(layout))
            whole = ir.Constant(ir.VectorType(byte, len(layout)), list(layout))
            builder.store(whole, builder.bitcast(table, whole.type.as_pointer()), align=1)
            _amx(builder, "ldtilecfg", table)
        return context.get_dummy_value()

    return types.void(factors), generate


@intrinsic
def release_amx(context: Any, factors: Any) -> Any:
    """The end of what `set_up_amx` begins."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if HAS_AMX and factors.dtype == types.uint16:
            _amx(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(factors), generate


def _amx(builder: Any, name: str, *arguments: Any) -> None:
    """One of AMX's instructions, of registers by number, addresses and sizes."""
    byte = ir.IntType(8)
    values = [byte(argument) if isinstance(argument, int) else argument for argument in arguments]
    values = [builder.bitcast(v, byte.as_pointer()) if isinstance(v.type, ir.PointerType) else v for v in values]
    signature = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), signature), values)


def _bytes(builder: Any, numbers: Any) -> Any:
    """The size of bfloat16 numbers."""
    return builder.shl(numbers, INT64(1))


def _memory(builder: Any, number: Any, count: int) -> Any:
    """A pointer to room for so many numbers, which lives as long as the function runs."""
    whole = cgutils.alloca_once(builder, ir.ArrayType(number, count))
    return builder.bitcast(whole, number.as_pointer())


def _places(builder: Any, place: Any, line: Any, rows: int) -> list[Any]:
    """Where the vectors of a tile's rows are."""
    lines = [builder.add(place, builder.mul(line, INT64(r))) for r in range(rows)]
    return [index(builder, own, LANES * v) for own in lines for v in range(TILE_VECTORS)]


def _panel_line(builder: Any, numbers_type: Any, numbers: Any, at: Any) -> list[Any]:
    """TILE_COLUMNS float32 of a panel's float32, bfloat16 in words (`words_at`) or float16 numbers (`half_pointer`)."""
    if numbers_type.dtype == types.uint16:
        return words_at(builder, numbers, at)
    reads = halves_at if numbers_type.dtype == types.int16 else read
    return [reads(builder, numbers, index(builder, at, LANES * v)) for v in range(TILE_VECTORS)]


def _sums(
    builder: Any, left_type: Any, right_type: Any, left: Any, first: Any, left_line: Any, left_step: Any, right: Any,
    start: Any, right_line: Any, depth: Any, *, rows: int, ahead: int,
) -> Any:  # fmt: skip
    """The sums of a `panel_tile`."""
    in_pairs = left_type.dtype == types.uint16
    firsts = [builder.add(first, builder.mul(left_line, INT64(r))) for r in range(rows)]

    def read_line(at: Any) -> list[Any]:
        if in_pairs:
            return [pairs_at(builder, right, index(builder, at, 2 * LANES * v)) for v in range(TILE_VECTORS)]
        return _panel_line(builder, right_type, right, at)

    def body(k: Any, sums: Any) -> Any:
        at, step = builder.add(start, builder.mul(k, right_line)), builder.mul(k, left_step)
        if ahead:
            bring_nearer(builder, right, at, ahead, TILE_COLUMNS * (2 if in_pairs else 1), 0)
        vectors, own = read_line(at), [builder.add(place, step) for place in firsts]
        if in_pairs:
            factors = (pair_at(builder, left, place) for place in own)
        else:
            factors = (broadcast(builder, builder.load(builder.gep(left, [place]))) for place in own)
        pairs, add = ((factor, vector) for factor in factors for vector in vectors), add_pairs if in_pairs else fma
        return [add(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

    steps = builder.ashr(depth, INT64(1)) if in_pairs else depth
    return loop(builder, steps, 1, [constant(0.0)] * (rows * TILE_VECTORS), body)


@intrinsic
def pack_line(context: Any, outputs: Any, place: Any, numbers: Any, start: Any) -> Any:
    """Write TILE_COLUMNS float32 as bfloat16 numbers in words (`words_at`), or as float16 ones (`half_pointer`).
    Returns bits that are 0 if the numbers are the same then."""
    is_float16 = outputs.dtype == types.int16

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        outputs, place, numbers, start = arguments
        places = [index(builder, start, LANES * v) for v in range(TILE_VECTORS)]
        vectors = [read(builder, numbers, at) for at in places]
        if not is_float16:
            return put_words(builder, outputs, place, *vectors)
        lost = [
            put_halves(builder, outputs, index(builder, place, LANES * v), vector) for v, vector in enumerate(vectors)
        ]
        return builder.or_(*lost)

    return types.uint32(outputs, types.int64, numbers, types.int64), generate


@intrinsic
def widen_line(context: Any, outputs: Any, place: Any, numbers: Any, start: Any) -> Any:
    """Write TILE_COLUMNS float32 of what `pack_line` has written."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        outputs, place, own, start = arguments
        for v, vector in enumerate(_panel_line(builder, numbers, own, start)):
            write(builder, outputs, index(builder, place, LANES * v), vector)
        return context.get_dummy_value()

    return types.void(outputs, types.int64, numbers, types.int64), generate


@of_constants
def pair_rows(context: Any, outputs: Any, place: Any, numbers: Any, start: Any, stride: Any, columns: Any) -> Any:
    """outputs[place + 2 c + k] = numbers[start + k stride + c] of two rows k of bfloat16 numbers, 16 or 8 columns c."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        outputs, place, numbers, start, stride, _ = arguments
        count = columns.literal_value
        first = bits_at(builder, numbers, start, count)
        second = bits_at(builder, numbers, builder.add(start, stride), count)
        places = [c + count * k for c in range(count) for k in (0, 1)]
        put_bits(builder, outputs, place, shuffled(builder, first, second, places))
        return context.get_dummy_value()

    whole = types.int64
    return types.void(outputs, whole, numbers, whole, whole, columns), generate


@of_constants
def pair_columns(
    context: Any, outputs: Any, place: Any, numbers: Any, start: Any, stride: Any, last: Any, columns: Any, depth: Any
) -> Any:  # fmt: skip
    """outputs[place + k / 2 2 TILE_COLUMNS + 2 c + k % 2] = numbers[start + min(c, last) stride + k] of bfloat16
    numbers, for 16 columns c, of which those from `columns` on are zeros, and `depth` numbers k: 32, 16 or 8."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        outputs, place, numbers, start, stride, last, *_ = arguments
        count = depth.literal_value
        own = [
            builder.select(builder.icmp_signed("<", INT64(c), last), INT64(c), last)
            for c in range(columns.literal_value)
        ]
        rows = [bits_at(builder, numbers, builder.add(start, builder.mul(stride, c)), count) for c in own]
        wide = [shuffled(builder, row, row, [k % count for k in range(32)]) for row in rows]
        pairs = [builder.bitcast(row, ir.VectorType(BITS, 16)) for row in wide]
        pairs += [ir.Constant(ir.VectorType(BITS, 16), [0] * 16)] * (16 - len(pairs))
        for k, vector in enumerate(transposed(builder, pairs)[: count // 2]):
            put_bits(builder, outputs, index(builder, place, 2 * TILE_COLUMNS * k), vector)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(outputs, whole, numbers, whole, whole, whole, columns, depth), generate


@of_constants
def transpose_rows(
    context: Any, outputs: Any, place: Any, line: Any, numbers: Any, start: Any, stride: Any, count: Any, columns: Any
) -> Any:  # fmt: skip
    """outputs[place + c line + r] = numbers[start + r stride + c] of LANES rows, of which those from `count` on are
    zeros, and LANES or fewer columns."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        outputs, place, line, numbers, start, stride, count, _ = arguments
        size, rows, zeros = columns.literal_value, [], constant(0.0)
        for r in range(LANES):
            is_there = builder.icmp_signed("<", INT64(r), count)
            at = builder.mul(stride, builder.select(is_there, INT64(r), INT64(0)))
            row = read(builder, numbers, builder.add(start, at), size)
            row = shuffled(builder, row, row, [c % size for c in range(LANES)])
            rows.append(builder.select(is_there, row, zeros))
        for c, vector in enumerate(transposed(builder, rows)[:size]):
            write(builder, outputs, builder.add(place, builder.mul(line, INT64(c))), vector)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(outputs, whole, whole, numbers, whole, whole, whole, columns), generate


@of_constants
def weigh_tile(
    context: Any, outputs: Any, values: Any, at: Any, probs: Any, place: Any, line: Any, first: Any,
    rows: Any, count: Any, width: Any, stride: Any,
) -> Any:  # fmt: skip
    """outputs[g] += sum of probs[g line + place + k] values[at + k stride], of `rows` outputs from `first` on,
    `count` values."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        outputs, values, at, probs, place, line, first, *_ = arguments
        lanes = lanes_in(width.literal_value)
        own = builder.mul(first, INT64(width.literal_value))
        lines = (builder.mul(line, index(builder, first, g)) for g in range(rows.literal_value))
        starts = [builder.add(place, start) for start in lines]
        weights = [
            [
                broadcast(builder, builder.load(builder.gep(probs, [index(builder, start, k)])), lanes)
                for k in range(count.literal_value)
            ]
            for start in starts
        ]
        for i in range(0, width.literal_value, lanes):
            places = [index(builder, own, g * width.literal_value + i) for g in range(rows.literal_value)]
            sums = [read(builder, outputs, place, lanes) for place in places]
            for k in range(count.literal_value):
                vector = read(builder, values, index(builder, at, k * stride.literal_value + i), lanes)
                sums = [fma(builder, vector, weights[g][k], total) for g, total in enumerate(sums)]
            for place, total in zip(places, sums, strict=True):
                write(builder, outputs, place, total)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(outputs, values, whole, probs, whole, whole, whole, rows, count, width, stride), generate


@of_constants
def weigh_pairs(
    context: Any, outputs: Any, values: Any, at: Any, following: Any, probs: Any, place: Any, line: Any, first: Any,
    rows: Any, count: Any, width: Any, stride: Any,
) -> Any:  # fmt: skip
    """outputs[g] += sum over `count` pairs k of probs[g line + place + 2 k + 1] values[at + 2 k stride] and then of
    probs[g line + place + 2 k] values[at + following + 2 k stride], of `rows` outputs g from `first` on. Probabilities
    and values are bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        outputs, values, at, following, probs, place, line, first, _, count, *_ = arguments
        size, numbers = width.literal_value, range(rows.literal_value)
        own = [builder.add(place, builder.mul(line, index(builder, first, g))) for g in numbers]
        for column in range(0, size, 64):
            columns = range(column, min(column + 64, size), 16)
            flat = [index(builder, builder.mul(first, INT64(size)), g * size + c) for g in numbers for c in columns]

            def body(k: Any, sums: Any, columns: Any = columns) -> Any:
                start = builder.add(at, builder.mul(k, INT64(2 * stride.literal_value)))
                vectors = []
                for c in columns:
                    own_value = bits_at(builder, values, index(builder, start, c), 16)
                    next_value = bits_at(builder, values, index(builder, builder.add(start, following), c), 16)
                    places = [i + 16 * half for i in range(16) for half in (0, 1)]
                    vectors.append(as_pairs(builder, shuffled(builder, next_value, own_value, places)))
                step = builder.shl(k, INT64(1))
                weights = (pair_at(builder, probs, builder.add(row, step)) for row in own)
                pairs = ((weight, vector) for weight in weights for vector in vectors)
                return [add_pairs(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

            sums = loop(builder, count, 1, [read(builder, outputs, at_row, 16) for at_row in flat], body)
            for at_row, total in zip(flat, sums, strict=True):
                write(builder, outputs, at_row, total)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(outputs, values, whole, whole, probs, whole, whole, whole, rows, whole, width, stride), generate


@of_constants
def prefetch(context: Any, numbers: Any, at: Any, count: Any) -> Any:
    """Bring `count` numbers into the second cache of the core."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bring_nearer(builder, arguments[0], arguments[1], 0, count.literal_value, 1)
        return context.get_dummy_value()

    return types.void(numbers, types.int64, count), generate
