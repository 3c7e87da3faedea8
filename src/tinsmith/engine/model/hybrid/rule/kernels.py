"""`fused.RuleKernels` in Triton: the gated delta rule on chunks, see `chunk_rule` for the formulas and their letters.

All compute in float32 on the tensor cores (products of three TF32 parts, as exact as float32). A program has a chunk
and a value head. Only the scans are sequential: a program goes through the chunks of one tree for some columns of
the state, which it hands from chunk to chunk through memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
from torch import Tensor

from tinsmith.engine.model.hybrid.rule import backward_kernels, forward_kernels
from tinsmith.engine.model.hybrid.rule.fused import RuleInputs

COLUMNS = 16
"""Columns of queries, keys, values and states that a program multiplies at a time. It loads them again where it needs
them again, which keeps registers and shared memory small."""
WARPS = 4
UNIT_WARPS = 8
"""For `unit_gradients`, which would spill registers on 8.0 with fewer."""


def corrections(inputs: RuleInputs) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused.RuleKernels`."""
    inverse, correction, added = (
        inputs.rows(width) for width in (inputs.size, inputs.shape.key_width, _values(inputs))
    )
    arguments = inputs.qkv, inputs.decay, inputs.beta, inputs.tokens, inverse, correction, added
    _launch(forward_kernels.corrections_kernel, _grid(inputs), *arguments, **settings(inputs))
    return inverse, correction, added


def scan(inputs: RuleInputs, correction: Tensor, added: Tensor, states: Tensor) -> None:
    """See `fused.RuleKernels`."""
    _launch(
        forward_kernels.scan_kernel,
        _scan_grid(inputs),
        *(inputs.qkv, inputs.decay, inputs.tokens),
        *(inputs.initial, inputs.final, inputs.order, inputs.bounds),
        *(states if inputs.outside is None else inputs.outside, correction, added, states),
        **settings(inputs),
    )


def outputs(inputs: RuleInputs, added: Tensor, states: Tensor) -> Tensor:
    """See `fused.RuleKernels`."""
    output = added.new_empty(len(inputs.decay), inputs.shape.value_heads, _values(inputs))
    _launch(
        forward_kernels.outputs_kernel,
        _grid(inputs),
        *(inputs.qkv, inputs.decay, inputs.tokens, inputs.initial),
        *(states if inputs.outside is None else inputs.outside, added, states, output),
        **settings(inputs),
    )
    return output


def added_gradients(inputs: RuleInputs, grad: Tensor) -> Tensor:
    """See `fused.RuleKernels`."""
    of_added = inputs.rows(_values(inputs))
    arguments = inputs.qkv, inputs.decay, inputs.tokens, grad, of_added
    _launch(backward_kernels.added_gradients_kernel, _grid(inputs), *arguments, **settings(inputs))
    return of_added


def scan_gradients(inputs: RuleInputs, correction: Tensor, grad: Tensor, of_added: Tensor, after: Tensor) -> None:
    """See `fused.RuleKernels`."""
    _launch(
        backward_kernels.scan_gradients_kernel,
        _scan_grid(inputs),
        *(inputs.qkv, inputs.decay, inputs.tokens),
        *(inputs.initial, inputs.final, inputs.order, inputs.bounds),
        *(correction, grad, of_added, after),
        **settings(inputs),
    )


def value_gradients(
    inputs: RuleInputs, inverse: Tensor, added: Tensor, grad: Tensor, of_added: Tensor, qkv_grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused.RuleKernels`."""
    wanted, products = torch.empty_like(of_added), inverse.new_empty(*inverse.shape[:2], 2, *inverse.shape[2:])
    beta_grad = inverse.new_empty(inputs.decay.shape)
    _launch(
        backward_kernels.value_gradients_kernel,
        _grid(inputs),
        *(inputs.qkv, inputs.beta, inputs.tokens, inverse, added, grad, of_added),
        *(wanted, qkv_grad, products, beta_grad),
        **settings(inputs),
    )
    return wanted, products, beta_grad


def product_gradients(inputs: RuleInputs, products: Tensor, beta_grad: Tensor) -> Tensor:
    """See `fused.RuleKernels`."""
    decay_grad = torch.empty_like(beta_grad)
    arguments = inputs.qkv, inputs.decay, inputs.beta, inputs.tokens, products, decay_grad, beta_grad
    _launch(backward_kernels.product_gradients_kernel, _grid(inputs), *arguments, **settings(inputs))
    return decay_grad


def state_gradients(
    inputs: RuleInputs,
    added: Tensor,
    states: Tensor,
    grad: Tensor,
    wanted: Tensor,
    after: Tensor,
    summed_grad: Tensor,
    beta_grad: Tensor,
) -> Tensor:
    """See `fused.RuleKernels`."""
    units = inputs.rows(2 * inputs.shape.key_width)
    _launch(
        backward_kernels.state_gradients_kernel,
        _grid(inputs),
        *(inputs.qkv, inputs.decay, inputs.beta, inputs.tokens, inputs.initial, inputs.final),
        *(states if inputs.outside is None else inputs.outside, added, states, grad, wanted, after),
        *(units, summed_grad, beta_grad),
        **settings(inputs),
    )
    return units


def unit_gradients(inputs: RuleInputs, products: Tensor, units: Tensor) -> None:
    """See `fused.RuleKernels`."""
    constants = settings(inputs, UNIT_WARPS)
    grid = *_grid(inputs), triton.cdiv(inputs.shape.key_width, constants["BLOCK_KEYS"])
    _launch(backward_kernels.unit_gradients_kernel, grid, inputs.qkv, products, units, **constants)


def norm_gradients(inputs: RuleInputs, units: Tensor, qkv_grad: Tensor) -> None:
    """See `fused.RuleKernels`."""
    grid = len(inputs.initial), inputs.shape.key_heads, 2
    _launch(backward_kernels.norm_gradients_kernel, grid, inputs.qkv, units, qkv_grad, **settings(inputs))


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    kernel[grid](*arguments, **constants)


def settings(inputs: RuleInputs, warps: int = WARPS) -> dict[str, Any]:
    """Sizes and constants of all kernels; `warps` of each program."""
    shape = inputs.shape
    return {
        "size": inputs.size,
        "KEY_HEADS": shape.key_heads,
        "KEYS": shape.key_width,
        "HEADS": shape.value_heads,
        "VALUES": shape.value_width,
        "BLOCK": _block(inputs.size),
        "BLOCK_KEYS": min(_block(shape.key_width), COLUMNS),
        "BLOCK_VALUES": min(_block(shape.value_width), COLUMNS),
        "num_warps": warps,
        "num_stages": 1,
    }


def _values(inputs: RuleInputs) -> int:
    return inputs.shape.value_width


def _block(number: int) -> int:
    """Products have at least 16 rows and columns."""
    return max(16, triton.next_power_of_2(number))


def _grid(inputs: RuleInputs) -> tuple[int, int]:
    return len(inputs.initial), inputs.shape.value_heads


def _scan_grid(inputs: RuleInputs) -> tuple[int, int, int]:
    columns = triton.cdiv(_values(inputs), settings(inputs)["BLOCK_VALUES"])
    return len(inputs.bounds) - 1, inputs.shape.value_heads, columns
