"""What compiled loops are made of: numbers in memory, float32 or bfloat16, and functions of a number.

Loops compute in float32 whatever is in memory, and round to the nearest and then to even. They release Python's lock.
Machine code is kept in the cache folder, so that it is compiled once for a machine and a state of these files.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import cfunc, config, njit, types  # pyright: ignore[reportAttributeAccessIssue] - one comes by a star
from numba.extending import intrinsic

from tinsmith.engine.config import cache_folder


def _cache_folder() -> str:
    """Numba notices changes of a loop's own file, and not of the files that it imports. Machines that share the cache
    folder have folders of their own, since a file says what is compiled (`compiling`)."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    features = sorted(binding.get_host_cpu_features().items())
    processor = binding.get_host_cpu_name(), features, config.CPU_NAME, config.CPU_FEATURES
    digest = sha256(b"".join(file.read_bytes() for file in files) + repr(processor).encode())
    return str(cache_folder() / "numba" / digest.hexdigest()[:16])


config.CACHE_DIR = config.CACHE_DIR or _cache_folder()  # $NUMBA_CACHE_DIR goes first
BITS = ir.IntType(32)
compiled: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
summing: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})
"""Sums may be taken in any order, for vector instructions."""
c_function: Callable[..., Any] = cfunc(
    types.void(types.voidptr), nopython=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"}
)
"""The same, as a C function of a pointer, for `openmp.run`."""


def numbers_of(kind: str) -> tuple[type[Any], type[Any]]:
    """What the addresses of numbers are made for `pointer`, and the numbers that products read, for an
    `instructions.Kind`."""
    return (np.float64 if kind == "float32" else np.int64), (np.uint16 if kind == "pairs" else np.float32)


@intrinsic
def pointer(context: Any, address: Any) -> Any:
    """A pointer to numbers at an address: of float32 if it is a float, of bfloat16 if it is an int."""
    is_float32 = isinstance(address, types.Float)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.fptoui(arguments[0], ir.IntType(64)) if is_float32 else arguments[0]
        return builder.inttoptr(number, context.get_value_type(signature.return_type))

    return types.CPointer(types.float32 if is_float32 else types.uint16)(address), generate


@intrinsic
def half_pointer(context: Any, address: Any) -> Any:
    """A pointer to float16 numbers at an address that is an int. Numba has no such numbers: they are int16 to it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int16)(address), generate


@intrinsic
def pointer_like(context: Any, numbers: Any, address: Any) -> Any:
    """A pointer to numbers at an address that is an int, of the type of those that another pointer leads to."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[1], context.get_value_type(signature.return_type))

    return numbers(numbers, address), generate


@intrinsic
def as_float(context: Any, bits: Any) -> Any:
    """The float32 with these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def as_bits(context: Any, number: Any) -> Any:
    """The bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def bfloat16_bits(builder: Any, number: Any) -> Any:
    """The 16 bits of a float32 rounded to bfloat16, which are the upper half of its bits."""
    bits = builder.bitcast(number, BITS)
    odd = builder.and_(builder.lshr(bits, BITS(16)), BITS(1))
    upper = builder.lshr(builder.add(builder.add(bits, BITS(0x7FFF)), odd), BITS(16))
    is_number = builder.fcmp_ordered("ord", number, number)
    return builder.trunc(builder.select(is_number, upper, BITS(0x7FC0)), ir.IntType(16))


def from_bfloat16(builder: Any, bits: Any) -> Any:
    """The float32 of the bits of a bfloat16."""
    return builder.bitcast(builder.shl(builder.zext(bits, BITS), BITS(16)), ir.FloatType())


@intrinsic
def load(context: Any, pointer: Any, index: Any) -> Any:
    """The number there, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.load(builder.gep(arguments[0], [arguments[1]]))
        return number if pointer.dtype == types.float32 else from_bfloat16(builder, number)

    return types.float32(pointer, index), generate


@intrinsic
def store(context: Any, pointer: Any, index: Any, number: Any) -> Any:
    """Write a float32 there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, number = builder.gep(arguments[0], [arguments[1]]), arguments[2]
        builder.store(number if pointer.dtype == types.float32 else bfloat16_bits(builder, number), place)
        return context.get_dummy_value()

    return types.void(pointer, index, types.float32), generate


@intrinsic
def rounded(context: Any, pointer: Any, number: Any) -> Any:
    """A float32 as it would be read after it was stored at a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = arguments[1]
        return number if pointer.dtype == types.float32 else from_bfloat16(builder, bfloat16_bits(builder, number))

    return types.float32(pointer, types.float32), generate


EXP_COEFFICIENTS = tuple(
    np.float32(number)
    for number in (
        1.44269504,  # 1 / ln 2
        12582912,  # 1.5 * 2^23: the last bits of a sum with it are the nearest whole number
        -0.693359375,  # -ln 2 = the sum of these two
        2.12194440e-4,
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)
"""Of e^x = 2^n e^r with |r| <= ln 2 / 2, by a polynomial (Cephes' expf)."""


@njit(inline="always")
def exp(number: Any) -> Any:
    """e^x of a float32 within 2 units in its last place; beyond +-87 that of +-87; a finite number for NaN."""
    log2, shift, upper, lower, c7, c6, c5, c4, c3, c2 = EXP_COEFFICIENTS
    number = min(max(number, np.float32(-87)), np.float32(87))
    shifted = number * log2 + shift
    whole = shifted - shift
    rest = (number + whole * upper) + whole * lower
    power = (((((c7 * rest + c6) * rest + c5) * rest + c4) * rest + c3) * rest + c2) * rest
    return (power * rest + rest + np.float32(1)) * as_float((as_bits(shifted) << np.uint32(23)) + np.uint32(0x3F800000))


@njit(inline="always")
def sigmoid(number: Any) -> Any:
    """1 / (1 + e^-x)."""
    return np.float32(1) / (np.float32(1) + exp(-number))


@intrinsic
def void_pointer(context: Any, address: Any) -> Any:
    """A pointer to anything at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(address), generate


@intrinsic
def run_threads(context: Any, parallel: Any, function: Any, argument: Any, threads: Any) -> Any:
    """Call a C function of a pointer at an address in so many threads, by GOMP_parallel at another address."""
    void, pointed, number = ir.VoidType(), ir.IntType(8).as_pointer(), ir.IntType(32)
    called = ir.FunctionType(void, [pointed]).as_pointer()

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        parallel, function, argument, threads = arguments
        caller = builder.inttoptr(parallel, ir.FunctionType(void, [called, pointed, number, number]).as_pointer())
        target, own = builder.inttoptr(function, called), builder.inttoptr(argument, pointed)
        builder.call(caller, [target, own, builder.trunc(threads, number), number(0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def run_alone(context: Any, function: Any, argument: Any) -> Any:
    """Call a C function of a pointer at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointed = ir.IntType(8).as_pointer()
        target = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), [pointed]).as_pointer())
        builder.call(target, [builder.inttoptr(arguments[1], pointed)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def atomic_next(context: Any, counter: Any) -> Any:
    """The int64 that a pointer leads to, which is counted up; no two threads get the same."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.bitcast(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", number, ir.IntType(64)(1), "monotonic")

    return types.int64(counter), generate
