"""`fused.Kernels` in Triton: norms, rotations and gates that read and write each number once, and add a residual or
rotate in the same kernel. All compute in float32, whatever the dtypes of inputs and outputs, and round once."""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

HEADS_ELEMENTS = 2048
"""Numbers of the heads of one token that a program rotates, and of the rows that a program norms and gates."""
GATE_BLOCK = 1024
"""Numbers that a program gates."""


def add_norm(
    inputs: Tensor, addition: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor, Tensor]:
    """See `fused.Kernels`."""
    total = None
    if addition is not None:
        total = torch.empty_like(inputs, dtype=torch.promote_types(inputs.dtype, addition.dtype))
    normed = torch.empty_like(inputs, dtype=dtype)
    inverse_rms = torch.empty(inputs.shape[:-1], dtype=torch.float32, device=inputs.device)
    add_norm_kernel[(inverse_rms.numel(),)](  # pyright: ignore[reportIndexIssue]
        inputs, addition, weight, total, normed, inverse_rms, eps, **row_settings(inputs.shape[-1])
    )
    return total, normed, inverse_rms


def add_norm_backward(
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
    grad = torch.empty_like(normed_grad, dtype=dtype)
    addition_grad = None if addition_dtype in (None, dtype) else torch.empty_like(grad, dtype=addition_dtype)
    add_norm_backward_kernel[(inverse_rms.numel(),)](  # pyright: ignore[reportIndexIssue]
        normed_grad,
        total_grad,
        saved,
        weight,
        inverse_rms,
        grad,
        addition_grad,
        FROM_OUTPUT=from_output,
        **row_settings(grad.shape[-1]),
    )
    return grad, grad if addition_dtype == dtype else addition_grad


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `fused.Kernels`."""
    outputs = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    grid, settings = head_settings(heads, cos)
    strides = heads.stride(0), heads.stride(1)
    rotate_kernel[grid](heads, cos, sin, weight, outputs, eps, *strides, DIRECTION=1, **settings)  # pyright: ignore[reportIndexIssue]
    return outputs


def rotate_backward(
    grads: Tensor, heads: Tensor | None, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float
) -> Tensor:
    """See `fused.Kernels`."""
    outputs = torch.empty(grads.shape, dtype=grads.dtype, device=grads.device)
    grid, settings = head_settings(grads, cos)
    strides = grads.stride(0), grads.stride(1)
    if weight is None or heads is None:
        rotate_kernel[grid](grads, cos, sin, None, outputs, eps, *strides, DIRECTION=-1, **settings)  # pyright: ignore[reportIndexIssue]
    else:
        rotate_backward_kernel[grid](  # pyright: ignore[reportIndexIssue]
            grads, heads, cos, sin, weight, outputs, eps, *strides, heads.stride(0), heads.stride(1), **settings
        )
    return outputs


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See `fused.Kernels`."""
    output = torch.empty_like(gate)
    grid, settings = gate_settings(gate)
    silu_mul_kernel[grid](gate, up, output, gate.numel(), **settings)  # pyright: ignore[reportIndexIssue]
    return output


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """See `fused.Kernels`."""
    gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(up)
    grid, settings = gate_settings(gate)
    silu_mul_backward_kernel[grid](grad, gate, up, gate_grad, up_grad, gate.numel(), **settings)  # pyright: ignore[reportIndexIssue]
    return gate_grad, up_grad


def gated_norm(inputs: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `fused.Kernels`."""
    output = torch.empty_like(gate)
    grid, settings = rows_settings(gate)
    gated_norm_kernel[grid](inputs, gate, weight, output, eps, gate.shape[:-1].numel(), **settings)  # pyright: ignore[reportIndexIssue]
    return output


def gated_norm_backward(
    grad: Tensor, inputs: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `fused.Kernels`."""
    inputs_grad, gate_grad = torch.empty_like(inputs), torch.empty_like(gate)
    grid, settings = rows_settings(gate)
    gated_norm_backward_kernel[grid](  # pyright: ignore[reportIndexIssue]
        grad, inputs, gate, weight, inputs_grad, gate_grad, eps, gate.shape[:-1].numel(), **settings
    )
    return inputs_grad, gate_grad


def row_settings(columns: int) -> dict[str, int]:
    """Constants of a kernel with a program for each row."""
    block = triton.next_power_of_2(columns)
    return {"COLUMNS": columns, "BLOCK": block, "num_warps": min(max(block // 512, 4), 16)}


def head_settings(heads: Tensor, cos: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and constants of a kernel with a program for some heads of a token."""
    tokens, count, width = heads.shape
    rotary = cos.shape[-1]
    block = min(triton.next_power_of_2(count), max(1, HEADS_ELEMENTS // triton.next_power_of_2(width)))
    settings = {
        "HEADS": count,
        "WIDTH": width,
        "ROTARY": rotary,
        "BLOCK_HEADS": block,
        "BLOCK_HALF": triton.next_power_of_2(rotary // 2),
        "BLOCK_REST": triton.next_power_of_2(max(width - rotary, 1)),
        "num_warps": 4,
    }
    return (tokens, triton.cdiv(count, block)), settings


def rows_settings(rows: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Grid and constants of a kernel with a program for some rows."""
    count, columns = rows.shape[:-1].numel(), rows.shape[-1]
    block = triton.next_power_of_2(columns)
    block_rows = max(1, HEADS_ELEMENTS // block)
    settings = {"COLUMNS": columns, "BLOCK_ROWS": block_rows, "BLOCK": block, "num_warps": 4}
    return (triton.cdiv(count, block_rows),), settings


def gate_settings(gate: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Grid and constants of a kernel with a program for some numbers."""
    return (triton.cdiv(gate.numel(), GATE_BLOCK),), {"BLOCK": GATE_BLOCK, "num_warps": 4}


@triton.jit
def add_norm_kernel(
    inputs, addition, weight, total, normed, inverse_rms, eps, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """A row: total = inputs + addition, if there is one, and weight total / sqrt(mean(total^2) + eps)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < COLUMNS
    values = tl.load(inputs + row * COLUMNS + at, mask=inside, other=0.0).to(tl.float32)
    if addition is not None:
        values += tl.load(addition + row * COLUMNS + at, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * COLUMNS + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / COLUMNS + eps)
    tl.store(inverse_rms + row, scale)
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * COLUMNS + at, (values * scale * factors).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_backward_kernel(
    normed_grad,
    total_grad,
    saved,
    weight,
    inverse_rms,
    grad,
    addition_grad,
    FROM_OUTPUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row: the gradient of total, from those of both outputs of `add_norm_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < COLUMNS
    scale = tl.load(inverse_rms + row)
    factors = tl.load(weight + at, mask=inside, other=1.0).to(tl.float32)
    normed = tl.load(saved + row * COLUMNS + at, mask=inside, other=0.0).to(tl.float32)
    normed = normed / factors if FROM_OUTPUT else normed * scale
    grads = tl.load(normed_grad + row * COLUMNS + at, mask=inside, other=0.0).to(tl.float32) * factors
    grads = (grads - normed * (tl.sum(grads * normed, 0) / COLUMNS)) * scale
    if total_grad is not None:
        grads += tl.load(total_grad + row * COLUMNS + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad + row * COLUMNS + at, grads.to(grad.dtype.element_ty), mask=inside)
    if addition_grad is not None:
        tl.store(addition_grad + row * COLUMNS + at, grads.to(addition_grad.dtype.element_ty), mask=inside)


@triton.jit
def rotate_kernel(
    heads,
    cos,
    sin,
    weight,
    outputs,
    eps,
    token_stride,
    head_stride,
    DIRECTION: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Some heads of a token: normed, if there is a weight, and rotated."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    rest = ROTARY + tl.arange(0, BLOCK_REST)[None, :]
    rotated = (head < HEADS) & (half < ROTARY // 2)
    passed = (head < HEADS) & (rest < WIDTH)
    inputs = heads + token * token_stride + head * head_stride
    left = tl.load(inputs + half, mask=rotated, other=0.0).to(tl.float32)
    right = tl.load(inputs + ROTARY // 2 + half, mask=rotated, other=0.0).to(tl.float32)
    others = tl.load(inputs + rest, mask=passed, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1) + tl.sum(others * others, 1)
        scale = tl.rsqrt(squares / WIDTH + eps)[:, None]
        factor = half < ROTARY // 2
        left *= scale * tl.load(weight + half, mask=factor, other=0.0).to(tl.float32)
        right *= scale * tl.load(weight + ROTARY // 2 + half, mask=factor, other=0.0).to(tl.float32)
        others *= scale * tl.load(weight + rest, mask=rest < WIDTH, other=0.0).to(tl.float32)
    cosine = tl.load(cos + token * ROTARY + half, mask=half < ROTARY // 2, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * ROTARY + ROTARY // 2 + half, mask=half < ROTARY // 2, other=0.0).to(tl.float32)
    sine *= DIRECTION
    results = outputs + (token * HEADS + head) * WIDTH
    kind = outputs.dtype.element_ty
    tl.store(results + half, (left * cosine - right * sine).to(kind), mask=rotated)
    tl.store(results + ROTARY // 2 + half, (right * cosine + left * sine).to(kind), mask=rotated)
    if ROTARY < WIDTH:
        tl.store(results + rest, others.to(kind), mask=passed)


@triton.jit
def rotate_backward_kernel(
    grads,
    heads,
    cos,
    sin,
    weight,
    outputs,
    eps,
    grad_token_stride,
    grad_head_stride,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Some heads of a token: the gradients before the norm and the rotation."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    rest = ROTARY + tl.arange(0, BLOCK_REST)[None, :]
    rotated = (head < HEADS) & (half < ROTARY // 2)
    passed = (head < HEADS) & (rest < WIDTH)
    cosine = tl.load(cos + token * ROTARY + half, mask=half < ROTARY // 2, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * ROTARY + ROTARY // 2 + half, mask=half < ROTARY // 2, other=0.0).to(tl.float32)
    gradients = grads + token * grad_token_stride + head * grad_head_stride
    left = tl.load(gradients + half, mask=rotated, other=0.0).to(tl.float32)
    right = tl.load(gradients + ROTARY // 2 + half, mask=rotated, other=0.0).to(tl.float32)
    factor = half < ROTARY // 2
    left_grad = left * cosine + right * sine
    left_grad *= tl.load(weight + half, mask=factor, other=0.0).to(tl.float32)
    right_grad = right * cosine - left * sine
    right_grad *= tl.load(weight + ROTARY // 2 + half, mask=factor, other=0.0).to(tl.float32)
    others_grad = tl.load(gradients + rest, mask=passed, other=0.0).to(tl.float32)
    others_grad *= tl.load(weight + rest, mask=rest < WIDTH, other=0.0).to(tl.float32)
    inputs = heads + token * token_stride + head * head_stride
    left = tl.load(inputs + half, mask=rotated, other=0.0).to(tl.float32)
    right = tl.load(inputs + ROTARY // 2 + half, mask=rotated, other=0.0).to(tl.float32)
    others = tl.load(inputs + rest, mask=passed, other=0.0).to(tl.float32)
    squares = tl.sum(left * left, 1) + tl.sum(right * right, 1) + tl.sum(others * others, 1)
    scale = tl.rsqrt(squares / WIDTH + eps)[:, None]
    along = tl.sum(left_grad * left, 1) + tl.sum(right_grad * right, 1) + tl.sum(others_grad * others, 1)
    along = along[:, None] * scale * scale / WIDTH
    results = outputs + (token * HEADS + head) * WIDTH
    kind = outputs.dtype.element_ty
    tl.store(results + half, ((left_grad - left * along) * scale).to(kind), mask=rotated)
    tl.store(results + ROTARY // 2 + half, ((right_grad - right * along) * scale).to(kind), mask=rotated)
    if ROTARY < WIDTH:
        tl.store(results + rest, ((others_grad - others * along) * scale).to(kind), mask=passed)


@triton.jit
def silu_mul_kernel(gate, up, output, size, BLOCK: tl.constexpr):
    """Some numbers: silu(gate) up."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gates = tl.load(gate + at, mask=at < size, other=0.0).to(tl.float32)
    ups = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(output + at, (gates * tl.sigmoid(gates) * ups).to(output.dtype.element_ty), mask=at < size)


@triton.jit
def silu_mul_backward_kernel(grad, gate, up, gate_grad, up_grad, size, BLOCK: tl.constexpr):
    """Some numbers: the gradients of gate and up."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grads = tl.load(grad + at, mask=at < size, other=0.0).to(tl.float32)
    gates = tl.load(gate + at, mask=at < size, other=0.0).to(tl.float32)
    ups = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gates)
    derivative = sigmoid * (1 + gates * (1 - sigmoid))
    tl.store(gate_grad + at, (grads * ups * derivative).to(gate_grad.dtype.element_ty), mask=at < size)
    tl.store(up_grad + at, (grads * gates * sigmoid).to(up_grad.dtype.element_ty), mask=at < size)


@triton.jit
def gated_norm_kernel(
    inputs, gate, weight, output, eps, rows, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Some rows: weight inputs / sqrt(mean(inputs^2) + eps) silu(gate)."""
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    at = row * COLUMNS + column
    inside = (row < rows) & (column < COLUMNS)
    values = tl.load(inputs + at, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / COLUMNS + eps)[:, None]
    results = values * scale * factors * gates * tl.sigmoid(gates)
    tl.store(output + at, results.to(output.dtype.element_ty), mask=inside)


@triton.jit
def gated_norm_backward_kernel(
    grad,
    inputs,
    gate,
    weight,
    inputs_grad,
    gate_grad,
    eps,
    rows,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some rows: the gradients of inputs and gate."""
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    at = row * COLUMNS + column
    inside = (row < rows) & (column < COLUMNS)
    values = tl.load(inputs + at, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    grads = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * factors
    scale = tl.rsqrt(tl.sum(values * values, 1) / COLUMNS + eps)[:, None]
    normed = values * scale
    sigmoid = tl.sigmoid(gates)
    derivative = sigmoid * (1 + gates * (1 - sigmoid))
    tl.store(gate_grad + at, (grads * normed * derivative).to(gate_grad.dtype.element_ty), mask=inside)
    grads *= gates * sigmoid
    along = (tl.sum(grads * normed, 1) / COLUMNS)[:, None]
    tl.store(inputs_grad + at, ((grads - normed * along) * scale).to(inputs_grad.dtype.element_ty), mask=inside)
