"""The causal convolution before a recurrent layer: over the chunks of a packed tree, and for single tokens.

Taps are summed in float32 in one order, so that a token alone gets the sum that it gets in a pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from typing_extensions import override

from tinsmith.engine.model.hybrid.chunk_tensors import ChunkTensors


def convolve(table: Tensor, ancestors: Tensor, weight: Tensor) -> Tensor:
    """silu of the convolution of C tokens: inputs `table` [M, channels], weight [channels, taps], oldest tap first.

    ancestors [C, taps]: rows of the table of a token, which is row 0, 1, ..., and those before it, nearest first.
    Returns [C, channels] of the table's dtype.
    """
    wide = torch.promote_types(table.dtype, torch.float32)
    taps = weight.to(wide).T
    output = table[: len(ancestors)].to(wide) * taps[-1]  # the token itself
    for distance in range(1, len(taps)):
        output = output + table.index_select(0, ancestors[:, distance]).to(wide) * taps[-1 - distance]
    return silu(output).to(table.dtype)


def convolve_chunks(mixed: Tensor, weight: Tensor, tree: ChunkTensors, outside: Tensor | None = None) -> Tensor:
    """The same for all slots of a tree [N, size, channels], of inputs `mixed` [C, channels].

    `outside` [states (taps - 1), channels] are the inputs before the outside states; they get no gradient.
    """
    return _ChunkConvolution.apply(mixed, weight, tree, outside)  # type: ignore[no-any-return]


def input_table(mixed: Tensor, outside: Tensor | None) -> Tensor:
    """The rows that `ChunkTree.ancestors` names: the pass's tokens, zeros, and those before the outside states."""
    return torch.cat([mixed, mixed.new_zeros(1, mixed.shape[1]), *([] if outside is None else [outside])])


class _ChunkConvolution(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, mixed: Tensor, weight: Tensor, tree: ChunkTensors, outside: Tensor | None) -> Tensor:
        wide = torch.promote_types(mixed.dtype, torch.float32)
        rows = input_table(mixed, outside).index_select(0, tree.inputs).to(wide)
        rows = rows.view(-1, tree.taps - 1 + tree.size, mixed.shape[1])
        taps = weight.to(wide).T.contiguous()
        last = len(taps) - 1
        sums = rows[:, last:] * taps[last]
        for distance in range(1, len(taps)):
            sums += rows[:, last - distance : last - distance + tree.size] * taps[last - distance]
        ctx.save_for_backward(sums, taps)
        ctx.tree, ctx.dtype = tree, mixed.dtype
        return silu(sums).to(mixed.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sums, taps = ctx.saved_tensors
        tree: ChunkTensors = ctx.tree
        grad = torch.ops.aten.silu_backward(grads[0].to(sums.dtype), sums)
        rows = grad.new_zeros(len(grad), tree.taps - 1 + tree.size, grad.shape[2])
        for number, tap in enumerate(taps):
            rows[:, number : number + tree.size].addcmul_(grad, tap)
        flat = rows.flatten(0, 1)
        total = flat.index_select(0, tree.own_inputs)
        total.index_add_(0, tree.earlier, flat.index_select(0, tree.earlier_inputs))
        return total.to(ctx.dtype), None, None, None
