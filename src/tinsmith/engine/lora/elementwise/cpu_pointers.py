"""Numbers in memory for compiled loops (Numba): float32, or bfloat16, which has no type of its own there.

Loops compute in float32 whatever is in memory, and round once, to the nearest and then to even.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

BITS = ir.IntType(32)
KINDS = {torch.float32: float, torch.bfloat16: int}


def place(tensor: Tensor) -> float:
    """The address of a tensor's numbers, for `pointer`: a float if they are float32, an int if they are bfloat16.

    The types of its arguments choose a loop's machine code, and Python's own are the fastest to recognize. A double
    holds an address of up to 53 bits, and those of programs have at most 48 unless they ask for more.
    """
    return KINDS[tensor.dtype](tensor.data_ptr())


@intrinsic
def pointer(context: Any, address: Any) -> Any:
    """A pointer to the numbers that `place` found."""
    is_float32 = isinstance(address, types.Float)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.fptoui(arguments[0], ir.IntType(64)) if is_float32 else arguments[0]
        return builder.inttoptr(number, context.get_value_type(signature.return_type))

    return types.CPointer(types.float32 if is_float32 else types.uint16)(address), generate


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


@intrinsic
def load(context: Any, pointer: Any, index: Any) -> Any:
    """The number there, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.load(builder.gep(arguments[0], [arguments[1]]))
        if pointer.dtype == types.float32:
            return number
        return builder.bitcast(builder.shl(builder.zext(number, BITS), BITS(16)), ir.FloatType())

    return types.float32(pointer, index), generate


@intrinsic
def store(context: Any, pointer: Any, index: Any, number: Any) -> Any:
    """Write a float32 there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = arguments[2]
        if pointer.dtype != types.float32:
            bits = builder.bitcast(number, BITS)
            odd = builder.and_(builder.lshr(bits, BITS(16)), BITS(1))
            rounded = builder.lshr(builder.add(builder.add(bits, BITS(0x7FFF)), odd), BITS(16))
            is_number = builder.fcmp_ordered("ord", number, number)
            number = builder.trunc(builder.select(is_number, rounded, BITS(0x7FC0)), ir.IntType(16))
        builder.store(number, builder.gep(arguments[0], [arguments[1]]))
        return context.get_dummy_value()

    return types.void(pointer, index, types.float32), generate


@njit(inline="always")
def exp(number: Any) -> Any:
    """e^x of a float32 within 2 units in its last place; beyond +-87 that of +-87, and something finite of NaN.

    2^n e^r with |r| <= ln 2 / 2, by a polynomial (Cephes' expf).
    """
    number = min(max(number, np.float32(-87)), np.float32(87))
    shifted = number * np.float32(1.44269504) + np.float32(12582912)  # 1.5 * 2^23: the sum's last bits are n
    whole = shifted - np.float32(12582912)
    rest = number - whole * np.float32(0.693359375)
    rest = rest + whole * np.float32(2.12194440e-4)
    power = np.float32(1.9875691500e-4)
    power = power * rest + np.float32(1.3981999507e-3)
    power = power * rest + np.float32(8.3334519073e-3)
    power = power * rest + np.float32(4.1665795894e-2)
    power = power * rest + np.float32(1.6666665459e-1)
    power = power * rest + np.float32(5.0000001201e-1)
    power = power * rest * rest + rest + np.float32(1)
    return power * as_float((as_bits(shifted) << np.uint32(23)) + np.uint32(0x3F800000))
