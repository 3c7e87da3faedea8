"""Norms, rotations and gates as compiled loops.

Arguments that are tensors are addresses (`pointer`), and a loop with `first` and `last` computes the rows from the one
to before the other. Results are rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tinsmith.engine.cpu.primitives import compiled, exp, load, numbers_of, pointer, sigmoid, store, summing


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


def compile_loops(kind: str) -> None:
    """Compile what layers of an `instructions.Kind` with a float32 residual call."""
    zero, wide = numbers_of(kind)[0](0), 0.0
    norm_rows(0, 0, wide, zero, zero, wide, 0, 0.0)
    add_norm_rows(0, 0, wide, zero, wide, zero, zero, wide, 0, 0.0)
    for total_grads, narrow in ((wide, wide), (wide, zero), (zero, wide)):
        norm_backward_rows(0, 0, zero, total_grads, True, zero, wide, wide, True, wide, wide, narrow, True, 0)
    rotate_rows(0, 0, zero, zero, zero, zero, 0, 0, 0, 0, 0, 1.0)
    silu_mul_numbers(0, 0, zero, zero, zero)
    silu_mul_backward_numbers(0, 0, zero, zero, zero, zero, zero)
