"""`chunk_rule` by a GPU's kernels: ten launches forward and backward, whatever the number of chunks.

Everything here works without Triton, which only the kernels need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from tinsmith.engine.model.hybrid.chunk_rule import HeadShape
from tinsmith.engine.model.hybrid.chunk_tensors import ChunkTensors


@dataclass(frozen=True, slots=True)
class RuleInputs:
    """The arguments of `chunk_rule`, and the tables of `ScanTables`."""

    qkv: Tensor
    decay: Tensor
    beta: Tensor
    outside: Tensor | None
    tokens: Tensor
    initial: Tensor
    final: Tensor
    order: Tensor
    bounds: Tensor
    shape: HeadShape

    @property
    def size(self) -> int:
        """Tokens of a chunk."""
        return self.qkv.shape[1]

    def rows(self, width: int) -> Tensor:
        """Empty float32 [N, H, size, width]."""
        heads = self.shape.value_heads
        return torch.empty(len(self.qkv), heads, self.size, width, dtype=torch.float32, device=self.qkv.device)


class RuleKernels(Protocol):
    """What a GPU computes in one launch each, in float32; all tensors are contiguous. See `chunk_rule` for the
    letters. N chunks, H value heads, C tokens, `states` [states, H, dk, dv] after the chunks that `final` numbers."""

    def corrections(self, inputs: RuleInputs) -> tuple[Tensor, Tensor, Tensor]:
        """T [N, H, size, size]; T b e K [N, H, size, dk]; u from zeros, T b v [N, H, size, dv]."""
        ...

    def scan(self, inputs: RuleInputs, correction: Tensor, added: Tensor, states: Tensor) -> None:
        """Change `added` to u, and write the states, chunk by chunk."""
        ...

    def outputs(self, inputs: RuleInputs, added: Tensor, states: Tensor) -> Tensor:
        """o [C, H, dv]."""
        ...

    def added_gradients(self, inputs: RuleInputs, grad: Tensor) -> Tensor:
        """The gradient of u [N, H, size, dv] by the outputs of the same chunk, from theirs [C, H, dv]."""
        ...

    def scan_gradients(
        self, inputs: RuleInputs, correction: Tensor, grad: Tensor, of_added: Tensor, after: Tensor
    ) -> None:
        """Add what comes from later chunks to the gradients of u, and to those of the states in `after`."""
        ...

    def value_gradients(
        self, inputs: RuleInputs, inverse: Tensor, added: Tensor, grad: Tensor, of_added: Tensor, qkv_grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write the gradients of the values to `qkv_grad`.

        Returns the gradient of b (v - e K S) [N, H, size, dv]; those of (q_i . k_j) D_ij and b_i (k_i . k_j) D_ij, with
        numbers above the diagonal too [N, H, 2, size, size]; and the values' part of that of beta [C, H].
        """
        ...

    def product_gradients(self, inputs: RuleInputs, products: Tensor, beta_grad: Tensor) -> Tensor:
        """Change `products` to the gradients of q_i . k_j and k_i . k_j, and add their part of that of beta.

        Returns their part of the gradient of the summed decays [C, H].
        """
        ...

    def state_gradients(
        self,
        inputs: RuleInputs,
        added: Tensor,
        states: Tensor,
        grad: Tensor,
        wanted: Tensor,
        after: Tensor,
        summed_grad: Tensor,
        beta_grad: Tensor,
    ) -> Tensor:
        """Add the states' part of the gradient of beta, and turn that of the summed decays, with the states' part, into
        that of the decays. `wanted` is the gradient of b (v - e K S).

        Returns the states' part of the gradients of normalized queries and keys [N, H, size, 2 dk], by value head.
        """
        ...

    def unit_gradients(self, inputs: RuleInputs, products: Tensor, units: Tensor) -> None:
        """Add the part of q_i . k_j and k_i . k_j to the gradients of normalized queries and keys."""
        ...

    def norm_gradients(self, inputs: RuleInputs, units: Tensor, qkv_grad: Tensor) -> None:
        """Write the gradients of the raw queries and keys to `qkv_grad`, from those of the normalized ones."""
        ...


def fused_rule(
    kernels: RuleKernels,
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    shape: HeadShape,
    tree: ChunkTensors,
    outside: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `chunk_rule`; of any dtype but float64."""
    return _FusedRule.apply(kernels, qkv, decay, beta, shape, tree, outside)  # type: ignore[no-any-return]


class _FusedRule(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        kernels: RuleKernels,
        qkv: Tensor,
        decay: Tensor,
        beta: Tensor,
        shape: HeadShape,
        tree: ChunkTensors,
        outside: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        scan = tree.scan
        tables = scan.tokens, scan.initial, scan.final, scan.order, scan.bounds
        outside = None if outside is None else outside.contiguous()
        inputs = RuleInputs(qkv.contiguous(), decay.contiguous(), beta.contiguous(), outside, *tables, shape)
        inverse, correction, added = kernels.corrections(inputs)
        states = inverse.new_empty(scan.states, shape.value_heads, shape.key_width, shape.value_width)
        kernels.scan(inputs, correction, added, states)
        ctx.work, ctx.kernels, ctx.ends = (inputs, correction, (inverse, added, states)), kernels, scan.ends
        return kernels.outputs(inputs, added, states), states.index_select(0, scan.ends)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, correction, saved = ctx.work
        ctx.work, kernels = None, ctx.kernels
        grad, after = grads[0].contiguous(), torch.zeros_like(saved[2])
        if len(ctx.ends):
            after.index_add_(0, ctx.ends, grads[1].to(after.dtype))
        of_added = kernels.added_gradients(inputs, grad)
        kernels.scan_gradients(inputs, correction, grad, of_added, after)
        qkv_grad = torch.empty_like(inputs.qkv)
        inverse, added, states = saved
        wanted, products, beta_grad = kernels.value_gradients(inputs, inverse, added, grad, of_added, qkv_grad)
        decay_grad = kernels.product_gradients(inputs, products, beta_grad)  # of the summed decays
        units = kernels.state_gradients(inputs, added, states, grad, wanted, after, decay_grad, beta_grad)
        kernels.unit_gradients(inputs, products, units)
        kernels.norm_gradients(inputs, units, qkv_grad)
        return None, qkv_grad, decay_grad, beta_grad, None, None, None
