"""`fused.Kernels` for CPUs: compiled loops over rows of numbers that are read and written once.

PyTorch's operators make several passes over memory for a norm, a rotation or a gate, and each of many small ones takes
microseconds. The loops are `engine.cpu.loops`; rows are divided among as many threads as PyTorch uses in the calling
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tinsmith.engine.cpu import loops
from tinsmith.engine.cpu.arguments import address

LEAST_NUMBERS = 1 << 16
"""Numbers that a thread computes at least: fewer take less time than it takes to start one."""


class CPUKernels:
    """See `fused.Kernels`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max(1, torch.get_num_threads()), "elementwise")

    def add_norm(
        self, inputs: Tensor, addition: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """See `fused.Kernels`."""
        rows, columns = inputs.shape[:-1].numel(), inputs.shape[-1]
        normed = torch.empty_like(inputs, dtype=dtype)
        inverse_rms = inputs.new_empty(inputs.shape[:-1], dtype=torch.float32)
        outputs = (address(weight), address(normed), address(inverse_rms), columns, eps)
        if addition is None:
            self._run(loops.norm_rows, rows, columns, address(inputs), *outputs)
            return None, normed, inverse_rms
        total = torch.empty_like(inputs, dtype=torch.promote_types(inputs.dtype, addition.dtype))
        self._run(loops.add_norm_rows, rows, columns, address(inputs), address(addition), address(total), *outputs)
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
        grad = torch.empty_like(normed_grad, dtype=dtype)
        narrow = None if addition_dtype in (None, dtype) else torch.empty_like(grad, dtype=addition_dtype)
        self._run(
            loops.norm_backward_rows,
            rows,
            columns,
            address(normed_grad),
            address(normed_grad if total_grad is None else total_grad),
            total_grad is not None,
            address(saved),
            address(wide),
            address(inverse),
            from_output,
            address(inverse_rms),
            address(grad),
            address(grad if narrow is None else narrow),
            narrow is not None,
            columns,
        )
        return grad, grad if addition_dtype == dtype else narrow

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """See `fused.Kernels`."""
        if weight is None:
            return self._rotate(loops.rotate_rows, heads, cos, sin, 1.0)
        return self._rotate(loops.norm_rotate_rows, heads, cos, sin, address(weight), eps)

    def rotate_backward(
        self, grads: Tensor, heads: Tensor | None, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float
    ) -> Tensor:
        """See `fused.Kernels`."""
        if weight is None or heads is None:
            return self._rotate(loops.rotate_rows, grads, cos, sin, -1.0)
        inputs = (address(heads), *heads.stride()[:2], address(weight), eps)
        return self._rotate(loops.norm_rotate_backward_rows, grads, cos, sin, *inputs)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `fused.Kernels`."""
        output = torch.empty_like(gate)
        self._run(loops.silu_mul_numbers, gate.numel(), 1, address(gate), address(up), address(output))
        return output

    def silu_mul_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """See `fused.Kernels`."""
        gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(up)
        tensors = (grad, gate, up, gate_grad, up_grad)
        self._run(loops.silu_mul_backward_numbers, gate.numel(), 1, *map(address, tensors))
        return gate_grad, up_grad

    def gated_norm(self, inputs: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `fused.Kernels`."""
        output, columns = torch.empty_like(gate), gate.shape[-1]
        tensors = map(address, (inputs, gate, weight, output))
        self._run(loops.gated_norm_rows, gate.numel() // columns, columns, *tensors, columns, eps)
        return output

    def gated_norm_backward(
        self, grad: Tensor, inputs: Tensor, gate: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `fused.Kernels`."""
        inputs_grad, gate_grad, columns = torch.empty_like(inputs), torch.empty_like(gate), gate.shape[-1]
        tensors = map(address, (grad, inputs, gate, weight, inputs_grad, gate_grad))
        self._run(loops.gated_norm_backward_rows, gate.numel() // columns, columns, *tensors, columns, eps)
        return inputs_grad, gate_grad

    def _rotate(self, loop: Callable[..., None], heads: Tensor, cos: Tensor, sin: Tensor, *arguments: Any) -> Tensor:
        """What a loop over tokens makes of heads [T, H, D], of any strides but the last."""
        tokens, count, width = heads.shape
        outputs = heads.new_empty(heads.shape)
        tensors = map(address, (heads, cos, sin, outputs))
        sizes = (*heads.stride()[:2], count, width, cos.shape[-1])
        self._run(loop, tokens, count * width, *tensors, *sizes, *arguments)
        return outputs

    def _run(self, loop: Callable[..., None], rows: int, columns: int, *arguments: Any) -> None:
        """Compute all rows, in as many threads as PyTorch uses here."""
        threads = min(torch.get_num_threads(), rows * columns // LEAST_NUMBERS)
        if threads < 2:
            loop(0, rows, *arguments)
            return
        bounds = [rows * number // threads for number in range(threads + 1)]
        others = [self._pool.submit(loop, *bounds[n : n + 2], *arguments) for n in range(1, threads)]
        try:
            loop(0, bounds[1], *arguments)
        finally:  # they write to tensors that live as long as the call
            for other in others:
                other.result()
