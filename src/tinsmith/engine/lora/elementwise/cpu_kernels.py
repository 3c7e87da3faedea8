"""`fused.Kernels` for CPUs: loops that Numba compiles, over rows of numbers that are read and written once.

PyTorch's operators make several passes over memory for a norm, a rotation or a gate, and each of many small ones takes
microseconds. Compiled loops compute in float32 and round once, whatever the dtypes of inputs and outputs. They release
Python's lock; rows are divided among as many threads as PyTorch uses in the calling thread. Machine code is kept in the
cache folder, so that it is compiled once for a machine.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import config, njit
from torch import Tensor

from tinsmith.engine.config import cache_folder
from tinsmith.engine.lora.elementwise.cpu_pointers import exp, load, place, pointer, store

config.CACHE_DIR = config.CACHE_DIR or str(cache_folder() / "numba")  # $NUMBA_CACHE_DIR goes first
LEAST_NUMBERS = 1 << 16
"""Numbers that a thread computes at least: fewer take less time than it takes to start one."""
compiled: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
summing: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})
"""Sums may be taken in any order, for vector instructions."""


class CPUKernels:
    """See `fused.Kernels`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max(1, torch.get_num_threads()), "elementwise")

    def add_norm(
        self, inputs: Tensor, addition: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """See `fused.Kernels`."""
        rows, columns = inputs.shape[:-1].numel(), inputs.shape[-1]
        normed = torch.empty(inputs.shape, device=inputs.device, dtype=dtype)
        inverse_rms = torch.empty(inputs.shape[:-1], device=inputs.device, dtype=torch.float32)
        outputs = (place(weight), place(normed), place(inverse_rms), columns, eps)
        if addition is None:
            self._run(norm_rows, rows, columns, place(inputs), *outputs)
            return None, normed, inverse_rms
        total = torch.empty(inputs.shape, device=inputs.device, dtype=torch.promote_types(inputs.dtype, addition.dtype))
        self._run(add_norm_rows, rows, columns, place(inputs), place(addition), place(total), *outputs)
        return total, normed, inverse_rms

    def add_norm_backward(
        self,
        normed_grad: Tensor,
        total_grad: Tensor | None,
        saved: Tensor,
        weight: Tensor,
        inverse_rms: Tensor,
        dtype: torch.dtype,
        addition_dtype: torch.dtype | None,
        *,
        from_output: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """See `fused.Kernels`."""
        rows, columns = inverse_rms.numel(), normed_grad.shape[-1]
        wide = weight.float()
        inverse = 1 / wide if from_output else torch.ones_like(wide)
        grad = torch.empty(normed_grad.shape, device=normed_grad.device, dtype=dtype)
        narrow = (
            None
            if addition_dtype in (None, dtype)
            else torch.empty(grad.shape, device=grad.device, dtype=addition_dtype)
        )
        self._run(
            norm_backward_rows,
            rows,
            columns,
            place(normed_grad),
            place(normed_grad if total_grad is None else total_grad),
            total_grad is not None,
            place(saved),
            place(wide),
            place(inverse),
            from_output,
            place(inverse_rms),
            place(grad),
            place(grad if narrow is None else narrow),
            narrow is not None,
            columns,
        )
        return grad, grad if addition_dtype == dtype else narrow

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """See `fused.Kernels`."""
        tokens, count, width = heads.shape
        outputs = torch.empty(heads.shape, device=heads.device, dtype=heads.dtype)
        sizes = (*heads.stride()[:2], count, width, cos.shape[-1])
        tables = (place(cos), place(sin), place(outputs), *sizes)
        if weight is None:
            self._run(rotate_rows, tokens, count * width, place(heads), *tables, 1.0)
        else:
            self._run(norm_rotate_rows, tokens, count * width, place(heads), *tables, place(weight), eps)
        return outputs

    def rotate_backward(
        self, grads: Tensor, heads: Tensor | None, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float
    ) -> Tensor:
        """See `fused.Kernels`."""
        tokens, count, width = grads.shape
        outputs = torch.empty(grads.shape, device=grads.device, dtype=grads.dtype)
        sizes = (*grads.stride()[:2], count, width, cos.shape[-1])
        tables = (place(cos), place(sin), place(outputs), *sizes)
        if weight is None or heads is None:
            self._run(rotate_rows, tokens, count * width, place(grads), *tables, -1.0)
        else:
            inputs = (place(heads), *heads.stride()[:2], place(weight), eps)
            self._run(norm_rotate_backward_rows, tokens, count * width, place(grads), *tables, *inputs)
        return outputs

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `fused.Kernels`."""
        output = torch.empty_like(gate)
        self._run(silu_mul_numbers, gate.numel(), 1, place(gate), place(up), place(output))
        return output

    def silu_mul_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """See `fused.Kernels`."""
        gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(up)
        tensors = (grad, gate, up, gate_grad, up_grad)
        self._run(silu_mul_backward_numbers, gate.numel(), 1, *map(place, tensors))
        return gate_grad, up_grad

    def gated_norm(self, inputs: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `fused.Kernels`."""
        output, columns = torch.empty_like(gate), gate.shape[-1]
        tensors = map(place, (inputs, gate, weight, output))
        self._run(gated_norm_rows, gate.numel() // columns, columns, *tensors, columns, eps)
        return output

    def gated_norm_backward(
        self, grad: Tensor, inputs: Tensor, gate: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `fused.Kernels`."""
        inputs_grad, gate_grad, columns = torch.empty_like(inputs), torch.empty_like(gate), gate.shape[-1]
        tensors = map(place, (grad, inputs, gate, weight, inputs_grad, gate_grad))
        self._run(gated_norm_backward_rows, gate.numel() // columns, columns, *tensors, columns, eps)
        return inputs_grad, gate_grad

    def _run(self, loop: Callable[..., None], rows: int, columns: int, *arguments: Any) -> None:
        """Compute all rows, in as many threads as PyTorch uses here."""
        threads = min(torch.get_num_threads(), rows * columns // LEAST_NUMBERS)
        if threads < 2:
            loop(0, rows, *arguments)
            return
        bounds = [rows * number // threads for number in range(threads + 1)]
        others = [self._pool.submit(loop, *bounds[n : n + 2], *arguments) for n in range(1, threads)]
        loop(0, bounds[1], *arguments)
        for other in others:
            other.result()


@summing
def norm_rows(first, last, inputs, weight, normed, scale, columns, eps):
    """Rows of weight x / sqrt(mean(x^2) + eps), and of the factor without the weight."""
    inputs, weight = pointer(inputs), pointer(weight)
    normed, scale = pointer(normed), pointer(scale)
    for row in range(first, last):
        start, squares = row * columns, np.float32(0)
        for i in range(columns):
            number = load(inputs, start + i)
            squares += number * number
        factor = np.float32(1) / np.sqrt(squares / np.float32(columns) + np.float32(eps))
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
        start, squares = row * columns, np.float32(0)
        for i in range(columns):
            store(total, start + i, load(inputs, start + i) + load(addition, start + i))
        for i in range(columns):
            number = load(total, start + i)
            squares += number * number
        factor = np.float32(1) / np.sqrt(squares / np.float32(columns) + np.float32(eps))
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
            target, squares = (token * count + head) * width, np.float32(0)
            for i in range(width):
                number = load(heads, source + i)
                squares += number * number
            factor = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
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
    heads, weight, unrotated = (
        pointer(heads),
        pointer(weight),
        np.empty(width, np.float32),
    )
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
            squares, along = np.float32(0), np.float32(0)
            for i in range(width):
                number = load(heads, inputs + i)
                squares += number * number
                along += number * unrotated[i]
            factor = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
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
        sigmoid = np.float32(1) / (np.float32(1) + exp(-number))
        derivative = sigmoid * (np.float32(1) + number * (np.float32(1) - sigmoid))
        store(gate_grad, i, above * load(up, i) * derivative)
        store(up_grad, i, above * number * sigmoid)


@summing
def gated_norm_rows(first, last, inputs, gate, weight, output, columns, eps):
    """Rows of weight x / sqrt(mean(x^2) + eps) silu(gate)."""
    inputs, gate = pointer(inputs), pointer(gate)
    weight, output = pointer(weight), pointer(output)
    for row in range(first, last):
        start, squares = row * columns, np.float32(0)
        for i in range(columns):
            number = load(inputs, start + i)
            squares += number * number
        factor = np.float32(1) / np.sqrt(squares / np.float32(columns) + np.float32(eps))
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
        start, squares, along = row * columns, np.float32(0), np.float32(0)
        for i in range(columns):
            number = load(inputs, start + i)
            squares += number * number
        factor = np.float32(1) / np.sqrt(squares / np.float32(columns) + np.float32(eps))
        for i in range(columns):
            number, above = load(gate, start + i), load(grad, start + i)
            sigmoid = np.float32(1) / (np.float32(1) + exp(-number))
            derivative = sigmoid * (np.float32(1) + number * (np.float32(1) - sigmoid))
            store(gate_grad, start + i, above * load(inputs, start + i) * factor * load(weight, i) * derivative)
            weighted[i] = above * number * sigmoid * load(weight, i)
        for i in range(columns):
            along += weighted[i] * load(inputs, start + i)
        along *= factor * factor / np.float32(columns)
        for i in range(columns):
            store(inputs_grad, start + i, (weighted[i] - load(inputs, start + i) * along) * factor)
