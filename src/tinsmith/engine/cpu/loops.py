"""Norms, rotations, gates and the attention of decoding as loops that Numba compiles, over float32 or bfloat16.

Loops compute in float32 whatever is in memory, and round to the nearest and then to even: results once, and attention
where products do. They release Python's lock. Arguments that are tensors are addresses (`pointer`), and a loop with
`first` and `last` computes the rows from the one to before the other. Machine code is kept in the cache folder, so that
it is compiled once for a machine. Numba keeps it as long as this file is unchanged, so all that is compiled is here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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


@compiled
def exponentials(numbers, largest):
    """e^(x - largest), in place."""
    for i in range(len(numbers)):
        numbers[i] = exp(numbers[i] - largest)


@summing
def softmax(numbers, like):
    """The softmax of numbers, in place, rounded to the dtype of a pointer."""
    largest, total = numbers[0], np.float32(0)
    for i in range(len(numbers)):
        largest = max(largest, numbers[i])
    exponentials(numbers, largest)
    for i in range(len(numbers)):
        total += numbers[i]
    inverse = np.float32(1) / total
    for i in range(len(numbers)):
        numbers[i] = rounded(like, numbers[i] * inverse)


@njit(inline="always")
def score(query: Any, keys: Any, start: Any, count: Any, scores: Any, width: Any) -> None:
    """scores[k] = query . keys[k], of four keys at a time."""
    k = 0
    while k + 4 <= count:
        at = start + k * width
        sum0, sum1, sum2, sum3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(width):
            number = query[i]
            sum0 += number * load(keys, at + i)
            sum1 += number * load(keys, at + width + i)
            sum2 += number * load(keys, at + 2 * width + i)
            sum3 += number * load(keys, at + 3 * width + i)
        scores[k], scores[k + 1] = rounded(keys, sum0), rounded(keys, sum1)
        scores[k + 2], scores[k + 3] = rounded(keys, sum2), rounded(keys, sum3)
        k += 4
    while k < count:
        total = np.float32(0)
        for i in range(width):
            total += query[i] * load(keys, start + k * width + i)
        scores[k] = rounded(keys, total)
        k += 1


@njit(inline="always")
def weigh(output: Any, values: Any, start: Any, count: Any, probs: Any, width: Any, stride: Any) -> None:
    """output += sum of probs[k] values[k], of eight values at a time, `stride` numbers apart."""
    k = 0
    while k + 8 <= count:
        at = start + k * stride
        p0, p1, p2, p3, p4, p5, p6, p7 = (
            probs[k], probs[k + 1], probs[k + 2], probs[k + 3], probs[k + 4], probs[k + 5], probs[k + 6], probs[k + 7]
        )  # fmt: skip
        for i in range(width):
            output[i] += (
                p0 * load(values, at + i)
                + p1 * load(values, at + stride + i)
                + p2 * load(values, at + 2 * stride + i)
                + p3 * load(values, at + 3 * stride + i)
                + p4 * load(values, at + 4 * stride + i)
                + p5 * load(values, at + 5 * stride + i)
                + p6 * load(values, at + 6 * stride + i)
                + p7 * load(values, at + 7 * stride + i)
            )
        k += 8
    while k < count:
        for i in range(width):
            output[i] += probs[k] * load(values, start + k * stride + i)
        k += 1


@njit(inline="always")
def tokens_of(lengths: Any, row: Any, parts: Any) -> Any:
    """The tokens of a row's first parts; a sum of NumPy's takes seconds to compile."""
    total = 0
    for part in range(parts):
        total += lengths[row, part]
    return total


@njit(inline="always")
def longest_of(lengths: Any) -> Any:
    """The tokens of the longest row."""
    longest = 0
    for row in range(len(lengths)):
        longest = max(longest, tokens_of(lengths, row, lengths.shape[1]))
    return longest


@njit(inline="always")
def beginning(lengths: Any, row: Any, part: Any, unseen: Any) -> tuple[Any, Any]:
    """How many tokens a row has before one of its parts, and how many of the part are among its first `unseen`."""
    before = tokens_of(lengths, row, part)
    return before, min(max(0, unseen - before), lengths[row, part])


@njit(inline="always")
def clear(output: Any, query: Any) -> None:
    """Fill an output with 0, or with NaN if the query is NaN, which `exp` hides."""
    for i in range(len(output)):
        output[i] = query[0] * np.float32(0)


@njit(inline="always")
def copy(target: Any, target_start: Any, source: Any, source_start: Any, count: Any) -> None:
    """Copy numbers as they are."""
    for i in range(count):
        target[target_start + i] = source[source_start + i]


@njit(inline="always")
def read(rows: Any, start: Any, factor: Any, numbers: Any) -> None:
    """Fill rows with numbers times a factor, rounded to their dtype."""
    width = rows.shape[1]
    for row in range(len(rows)):
        for i in range(width):
            rows[row, i] = rounded(numbers, load(numbers, start + row * width + i) * np.float32(factor))


@njit(inline="always")
def write(rows: Any, start: Any, numbers: Any) -> None:
    """Store rows."""
    width = rows.shape[1]
    for row in range(len(rows)):
        for i in range(width):
            store(numbers, start + row * width + i, rows[row, i])


@cache
def attention_loop(key_width: int, value_width: int, value_stride: int) -> Callable[..., None]:
    """The loop for decoding with tokens of these widths, which are constants in its machine code: that halves its time.
    Each token's values are `value_stride` numbers after the last one's, more than their width if they are parts of
    its key."""

    @summing
    def attend_rows(layer, queries, new_keys, new_values, outputs, addresses, layer_bytes, capacities, lengths,
                    heads, group, scale, window):  # fmt: skip
        """Attention of a new token of each row of the KV cache, which is written to the last of the row's parts.

        queries [rows, heads group, key_width], new_keys and new_values [rows, heads, width] -> outputs [rows, heads
        group, value_width]. Of the parts: addresses [rows, parts, 2] of keys and values in layer 0, their bytes from
        one layer to the next, and int64 [rows, parts]: capacities and lengths in tokens, with the new one. A token sees
        all that there is, or if `window` is not 0, as many at the end. Scores and probabilities are rounded to the
        dtype, as products round them, so that the trainer gives a token the same logprob.
        """
        queries, outputs = pointer(queries), pointer(outputs)
        new_keys, new_values, parts = pointer(new_keys), pointer(new_values), lengths.shape[1]
        query, output = np.empty((group, key_width), np.float32), np.empty((group, value_width), np.float32)
        scores = np.empty((group, longest_of(lengths)), np.float32)
        for source in range(len(lengths) * heads):
            row, head = source // heads, source % heads
            total = tokens_of(lengths, row, parts)
            unseen = max(0, total - window) if window else 0
            read(query, source * group * key_width, scale, queries)
            for part in range(parts):
                keys = pointer(addresses[row, part, 0] + layer * layer_bytes[row, part, 0])
                start, count = head * capacities[row, part] * key_width, lengths[row, part]
                if part == parts - 1:
                    copy(keys, start + (count - 1) * key_width, new_keys, source * key_width, key_width)
                before, hidden = beginning(lengths, row, part, unseen)
                for g in range(group):
                    line, at = scores[g, before + hidden :], start + hidden * key_width
                    score(query[g], keys, at, count - hidden, line, key_width)
            for g in range(group):
                softmax(scores[g, unseen:total], queries)
                clear(output[g], query[g])
            for part in range(parts):
                values = pointer(addresses[row, part, 1] + layer * layer_bytes[row, part, 1])
                start, count = head * capacities[row, part] * value_stride, lengths[row, part]
                if part == parts - 1 and value_width == value_stride:
                    copy(values, start + (count - 1) * value_width, new_values, source * value_width, value_width)
                before, hidden = beginning(lengths, row, part, unseen)
                for g in range(group):
                    probs, at = scores[g, before + hidden :], start + hidden * value_stride
                    weigh(output[g], values, at, count - hidden, probs, value_width, value_stride)
            write(output, source * group * value_width, outputs)

    return attend_rows
