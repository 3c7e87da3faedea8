"""Norms, rotations and gates as loops that Numba compiles, over numbers in float32 or bfloat16.

Loops compute in float32 whatever is in memory, and round once, to the nearest and then to even. They release Python's
lock. Arguments that are tensors are addresses (`pointer`), and rows from `first` to before `last` are computed. Machine
code is kept in the cache folder, so that it is compiled once for a machine. Numba keeps it as long as this file is
unchanged, so all that is compiled is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.extending import intrinsic

from tinsmith.engine.config import cache_folder

config.CACHE_DIR = config.CACHE_DIR or str(cache_folder() / "numba")  # $NUMBA_CACHE_DIR goes first
BITS = ir.IntType(32)
compiled: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
summing: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})
"""Sums may be taken in any order, for vector instructions."""


@intrinsic
def pointer(context: Any, address: Any) -> Any:
    """A pointer to numbers at an address: of float32 if it is a float, of bfloat16 if it is an int."""
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
    """e^x of a float32 within 2 units in its last place; beyond +-87 that of +-87; a finite number for NaN.

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


@njit(inline="always")
def sigmoid(number: Any) -> Any:
    """1 / (1 + e^-x)."""
    return np.float32(1) / (np.float32(1) + exp(-number))


@njit(inline="always")
def inverse_rms(numbers: Any, start: Any, columns: Any, eps: Any) -> Any:
    """1 / sqrt(mean(x^2) + eps) of a row."""
    squares = np.float32(0)
    for i in range(columns):
        number = load(numbers, start + i)
        squares += number * number
    return np.float32(1) / np.sqrt(squares / np.float32(columns) + np.float32(eps))


@summing
def norm_rows(first, last, inputs, weight, normed, scale, columns, eps):
    """Rows of weight x / sqrt(mean(x^2) + eps), and of the factor without the weight."""
    inputs, weight = pointer(inputs), pointer(weight)
    normed, scale = pointer(normed), pointer(scale)
    for row in range(first, last):
        start = row * columns
        factor = inverse_rms(inputs, start, columns, eps)
        scale[row] = factor
        for i in range(columns):
            store(normed, start + i, load(inputs, start + i) * factor * load(weight, i))


@summing
def add_norm_rows(first, last, inputs, addition, total, weight, normed, scale, columns, eps):
    """The same of inputs + addition, which is `total`."""
    inputs, addition = pointer(inputs), pointer(addition)
    total, weight = pointer(total), pointer(weight)
    normed, scale = pointer(normed), pointer(scale)
    for row in range(first, last):
        start = row * columns
        for i in range(columns):
            store(total, start + i, load(inputs, start + i) + load(addition, start + i))
        factor = inverse_rms(total, start, columns, eps)
        scale[row] = factor
        for i in range(columns):
            store(normed, start + i, load(total, start + i) * factor * load(weight, i))


@summing
def norm_backward_rows(
    first,
    last,
    grads,
    total_grads,
    has_total,
    saved,
    weight,
    inverse_weight,
    from_output,
    scale,
    output,
    narrow,
    has_narrow,
    columns,
):
    """Rows of the gradient of what was normed, from those of the norm and, with `has_total`, of what was normed; with
    `has_narrow` in a second dtype too. `saved` times `inverse_weight` is the norm without its weight, or, unless
    `from_output`, what was normed."""
    grads, total_grads = pointer(grads), pointer(total_grads)
    saved, weight = pointer(saved), pointer(weight)
    inverse_weight, scale = pointer(inverse_weight), pointer(scale)
    output, narrow = pointer(output), pointer(narrow)
    for row in range(first, last):
        start, along, factor = row * columns, np.float32(0), scale[row]
        unit = np.float32(1) if from_output else factor
        for i in range(columns):
            along += load(grads, start + i) * weight[i] * load(saved, start + i) * inverse_weight[i]
        along *= unit * unit / np.float32(columns)
        for i in range(columns):
            normed = load(saved, start + i) * inverse_weight[i]
            store(output, start + i, (load(grads, start + i) * weight[i] - normed * along) * factor)
        if has_total:
            for i in range(columns):
                store(output, start + i, load(output, start + i) + load(total_grads, start + i))
        if has_narrow:
            for i in range(columns):
                store(narrow, start + i, load(output, start + i))


@compiled
def rotate_rows(first, last, heads, cos, sin, outputs, token_stride, head_stride, count, width, rotary, direction):
    """Heads of tokens, of which the first `rotary` numbers are rotated."""
    heads, outputs = pointer(heads), pointer(outputs)
    cos, sin, half = pointer(cos), pointer(sin), rotary // 2
    for token in range(first, last):
        table = token * rotary
        for head in range(count):
            source = token * token_stride + head * head_stride
            target = (token * count + head) * width
            for i in range(half):
                left, right = load(heads, source + i), load(heads, source + half + i)
                cosine, sine = load(cos, table + i), load(sin, table + half + i) * np.float32(direction)
                store(outputs, target + i, left * cosine - right * sine)
                store(outputs, target + half + i, right * cosine + left * sine)
            for i in range(rotary, width):
                outputs[target + i] = heads[source + i]


@summing
def norm_rotate_rows(
    first, last, heads, cos, sin, outputs, token_stride, head_stride, count, width, rotary, weight, eps
):
    """The same, each head normed before it is rotated."""
    heads, outputs = pointer(heads), pointer(outputs)
    cos, sin, half = pointer(cos), pointer(sin), rotary // 2
    weight = pointer(weight)
    for token in range(first, last):
        table = token * rotary
        for head in range(count):
            source = token * token_stride + head * head_stride
            target = (token * count + head) * width
            factor = inverse_rms(heads, source, width, eps)
            for i in range(half):
                left = load(heads, source + i) * factor * load(weight, i)
                right = load(heads, source + half + i) * factor * load(weight, half + i)
                cosine, sine = load(cos, table + i), load(sin, table + half + i)
                store(outputs, target + i, left * cosine - right * sine)
                store(outputs, target + half + i, right * cosine + left * sine)
            for i in range(rotary, width):
                store(outputs, target + i, load(heads, source + i) * factor * load(weight, i))


@summing
def norm_rotate_backward_rows(
    first,
    last,
    grads,
    cos,
    sin,
    outputs,
    token_stride,
    head_stride,
    count,
    width,
    rotary,
    heads,
    heads_token_stride,
    heads_head_stride,
    weight,
    eps,
):
    """Gradients of heads before the norm and the rotation."""
    grads, outputs = pointer(grads), pointer(outputs)
    cos, sin, half = pointer(cos), pointer(sin), rotary // 2
    heads, weight = pointer(heads), pointer(weight)
    unrotated = np.empty(width, np.float32)
    for token in range(first, last):
        table = token * rotary
        for head in range(count):
            source = token * token_stride + head * head_stride
            inputs, target = token * heads_token_stride + head * heads_head_stride, (token * count + head) * width
            for i in range(half):
                left, right = load(grads, source + i), load(grads, source + half + i)
                cosine, sine = load(cos, table + i), load(sin, table + half + i)
                unrotated[i] = (left * cosine + right * sine) * load(weight, i)
                unrotated[half + i] = (right * cosine - left * sine) * load(weight, half + i)
            for i in range(rotary, width):
                unrotated[i] = load(grads, source + i) * load(weight, i)
            factor, along = inverse_rms(heads, inputs, width, eps), np.float32(0)
            for i in range(width):
                along += load(heads, inputs + i) * unrotated[i]
            along *= factor * factor / np.float32(width)
            for i in range(width):
                store(outputs, target + i, (unrotated[i] - load(heads, inputs + i) * along) * factor)


@compiled
def silu_mul_numbers(first, last, gate, up, output):
    """silu(gate) up."""
    gate, up, output = pointer(gate), pointer(up), pointer(output)
    for i in range(first, last):
        number = load(gate, i)
        store(output, i, number / (np.float32(1) + exp(-number)) * load(up, i))


@compiled
def silu_mul_backward_numbers(first, last, grad, gate, up, gate_grad, up_grad):
    """The gradients of gate and up."""
    grad, gate, up = pointer(grad), pointer(gate), pointer(up)
    gate_grad, up_grad = pointer(gate_grad), pointer(up_grad)
    for i in range(first, last):
        number, above = load(gate, i), load(grad, i)
        gated = sigmoid(number)
        derivative = gated * (np.float32(1) + number * (np.float32(1) - gated))
        store(gate_grad, i, above * load(up, i) * derivative)
        store(up_grad, i, above * number * gated)


@summing
def gated_norm_rows(first, last, inputs, gate, weight, output, columns, eps):
    """Rows of weight x / sqrt(mean(x^2) + eps) silu(gate)."""
    inputs, gate = pointer(inputs), pointer(gate)
    weight, output = pointer(weight), pointer(output)
    for row in range(first, last):
        start = row * columns
        factor = inverse_rms(inputs, start, columns, eps)
        for i in range(columns):
            number = load(gate, start + i)
            silu = number / (np.float32(1) + exp(-number))
            store(output, start + i, load(inputs, start + i) * factor * load(weight, i) * silu)


@summing
def gated_norm_backward_rows(first, last, grad, inputs, gate, weight, inputs_grad, gate_grad, columns, eps):
    """Rows of the gradients of x and gate."""
    grad, inputs = pointer(grad), pointer(inputs)
    gate, weight = pointer(gate), pointer(weight)
    inputs_grad, gate_grad = pointer(inputs_grad), pointer(gate_grad)
    weighted = np.empty(columns, np.float32)
    for row in range(first, last):
        start, along = row * columns, np.float32(0)
        factor = inverse_rms(inputs, start, columns, eps)
        for i in range(columns):
            number, above = load(gate, start + i), load(grad, start + i)
            gated = sigmoid(number)
            derivative = gated * (np.float32(1) + number * (np.float32(1) - gated))
            store(gate_grad, start + i, above * load(inputs, start + i) * factor * load(weight, i) * derivative)
            weighted[i] = above * number * gated * load(weight, i)
        for i in range(columns):
            along += weighted[i] * load(inputs, start + i)
        along *= factor * factor / np.float32(columns)
        for i in range(columns):
            store(inputs_grad, start + i, (weighted[i] - load(inputs, start + i) * along) * factor)
