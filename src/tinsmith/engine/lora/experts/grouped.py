"""The experts of a mixture as grouped products, on GPUs whose grouped product of bfloat16 is one kernel.

The formulas are those of `install` and `separate`. Pairs are sorted on the device. A frozen product has a group for
each expert, an adapter's product one for each expert and adapter; where the experts share a matrix, the groups are the
tokens of each adapter (`owners`). So launches depend neither on the number of experts nor on that of adapters, and the
host reads nothing. Tokens without an adapter have one of zeros, and ranks are padded to the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tinsmith.engine.lora import grouped_adapters
from tinsmith.engine.lora.adapter import PlacedAdapter
from tinsmith.engine.lora.experts.owners import TokenOwners, grouped_outer, grouped_product, owners_of
from tinsmith.engine.lora.experts.pairs import Activations, ExpertPairs, sum_of_rows
from tinsmith.engine.lora.experts.stack import ExpertStack
from tinsmith.engine.lora.experts.stacked import StackedAdapters, stacked_adapters
from tinsmith.engine.lora.grouped_adapters import ALIGNMENT


def serves(stack: ExpertStack) -> bool:
    """Whether the products of these experts can be grouped."""
    is_aligned = not stack.hidden % ALIGNMENT and not stack.width % ALIGNMENT
    return is_aligned and grouped_adapters.has_grouped_products(stack.module.down_proj)


def outputs(
    hidden: Tensor, weights: Tensor, index: Tensor, stack: ExpertStack, placed: Sequence[PlacedAdapter]
) -> Tensor:
    """As `loops.outputs`."""
    if torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad):
        return _GroupedOutputs.apply(hidden, weights, index, stack, placed)  # type: ignore[no-any-return]
    return _forward(hidden, weights, _sorted(index, stack, placed), stack).output


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The P = T k pairs of a pass in one layer, sorted by expert and adapter."""

    order: Tensor
    """int64 [P]: each pair's index in the flattened [T, k]."""
    tokens: Tensor
    """int64 [P]."""
    experts: Tensor
    """int64 [P]."""
    by_token: Tensor
    """int64 [T, k]: the pairs of each token, by expert."""
    expert_ends: Tensor
    """int32 [E]: the end of each expert's pairs."""
    group_ends: Tensor
    """int32 [E owners]: the end of the pairs of each expert and adapter."""
    owners: TokenOwners
    kinds: tuple[StackedAdapters, ...]
    """The adapters, by whether experts share matrices."""

    def by_expert(self, rows: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
        """Each pair's row [P, in] times its expert's matrix of [E, in, out], plus its bias of [E, out]."""
        output = grouped_product(rows, weights, self.expert_ends)
        return output if bias is None else output.add_(bias[self.experts])

    def by_group(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Each pair's row [P, in] times the matrix of its expert and adapter of [E owners, in, out]."""
        return grouped_product(rows, matrices, self.group_ends)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Sums over each expert and adapter of the outer products of rows [P, m] and [P, n]: [E owners, m, n]."""
        return grouped_outer(left, right, self.group_ends)

    def sum_of_tokens(self, rows: Tensor) -> Tensor:
        """Sums over the experts of each token: [P, D] -> [T, D]."""
        return sum_of_rows(rows, self.by_token)

    def unsorted(self, values: Tensor) -> Tensor:
        """[P] in the order of the pairs -> [T, k]."""
        return torch.empty_like(values).index_copy_(0, self.order, values).view(self.by_token.shape)

    def scaled(self, rows: Tensor) -> Tensor:
        """Rows [P, R] times the scale of their adapter, in place."""
        scales = self.owners.scales
        return rows.mul_(scales[self.tokens] if isinstance(scales, Tensor) else scales)


def _sorted(index: Tensor, stack: ExpertStack, placed: Sequence[PlacedAdapter]) -> _Pairs:
    """Expert ids [T, k] -> the sorted pairs."""
    adapters, owners = owners_of(placed, len(index), index.device, stack.down_name)
    keys, order = (index * owners.count + owners.numbers[:, None]).flatten().sort(stable=True)
    tokens, experts = order // index.shape[1], keys // owners.count
    by_token = tokens.argsort(stable=True).view(index.shape)
    groups = torch.arange(stack.count * owners.count, device=index.device)
    group_ends = torch.searchsorted(keys, groups, right=True, out_int32=True)
    expert_ends = group_ends[owners.count - 1 :: owners.count].contiguous()
    kinds = stacked_adapters(adapters, stack.down_name)
    return _Pairs(order, tokens, experts, by_token, expert_ends, group_ends, owners, kinds)


def _forward(hidden: Tensor, weights: Tensor, pairs: _Pairs, stack: ExpertStack) -> Activations:
    rows = hidden.index_select(0, pairs.tokens)
    wide = pairs.by_expert(rows, stack.up_weights, stack.up_bias)
    narrow = [_add_up(wide, hidden, rows, pairs, adapters, stack) for adapters in pairs.kinds]
    flat = weights.flatten()[pairs.order]
    # h times its weight before the product, which it is smaller than: the products of a token are then only added up.
    scaled = (stack.activate(wide) * flat[:, None]).to(hidden.dtype)
    products = pairs.by_expert(scaled, stack.down_weights)
    if stack.down_bias is not None:
        products += (flat[:, None] * stack.down_bias[pairs.experts]).to(products.dtype)
    weighted = [pairs.by_group(scaled, adapters.a([stack.down_name]).mT) for adapters in pairs.kinds]
    for adapters, pieces in zip(pairs.kinds, weighted, strict=True):
        if adapters.separate:
            products += pairs.by_group(pairs.scaled(pieces), adapters.b(stack.down_name).mT)
    output = pairs.sum_of_tokens(products)
    for number, adapters in enumerate(pairs.kinds):
        if not adapters.separate:
            weighted[number] = pairs.owners.scaled(pairs.sum_of_tokens(weighted[number]))
            output += pairs.owners.product(weighted[number], adapters.b(stack.down_name).mT)
    return Activations(output, wide, narrow, weighted)


def _add_up(
    wide: Tensor, hidden: Tensor, rows: Tensor, pairs: _Pairs, adapters: StackedAdapters, stack: ExpertStack
) -> Tensor:
    """Add s B A x to the products before the gate; returns s A x."""
    names, matrices = stack.up_names, adapters.a(stack.up_names).mT
    if adapters.separate:
        narrow = of_pairs = pairs.scaled(pairs.by_group(rows, matrices))
    else:
        narrow = pairs.owners.scaled(pairs.owners.product(hidden, matrices))
        of_pairs = narrow.index_select(0, pairs.tokens)
    for name, view, piece in zip(names, stack.up_views(wide), of_pairs.chunk(len(names), dim=1), strict=True):
        view += pairs.by_group(piece, adapters.b(name).mT)
    return narrow


class _GroupedOutputs(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor, index: Tensor, stack: ExpertStack, placed: Sequence[PlacedAdapter]
    ) -> Tensor:
        pairs = _sorted(index, stack, placed)
        result = _forward(hidden, weights, pairs, stack)
        ctx.save_for_backward(hidden, weights, result.wide, *result.narrow, *result.weighted)
        ctx.pairs, ctx.stack = pairs, stack
        return result.output

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (hidden, weights, wide, *saved), pairs, stack = ctx.saved_tensors, ctx.pairs, ctx.stack
        narrow, weighted = saved[: len(pairs.kinds)], saved[len(pairs.kinds) :]
        flat = weights.flatten()[pairs.order]
        with torch.enable_grad():
            leaf = wide.detach().requires_grad_()
            live = stack.activate(leaf)
        activated, gathered = live.detach(), grads[0].index_select(0, pairs.tokens)
        plain = pairs.by_expert(gathered, stack.down_weights.mT)  # without the pair's weight
        for adapters, mixed in zip(pairs.kinds, weighted, strict=True):
            own = _backward_down(plain, grads[0], gathered, pairs, adapters, stack.down_name)
            if adapters.has_gradients:
                own = (own * flat[:, None]).to(own.dtype)
                adapters.add_gradients(stack.down_name, "a", pairs.outer(own, activated))
                b_grad = pairs.outer(gathered, mixed) if adapters.separate else pairs.owners.outer(grads[0], mixed)
                adapters.add_gradients(stack.down_name, "b", b_grad)
        weight_grad = (plain * activated).sum(-1, dtype=ExpertPairs.sum_dtype(plain.dtype))
        if stack.down_bias is not None:
            weight_grad += (gathered * stack.down_bias[pairs.experts]).sum(-1, dtype=weight_grad.dtype)
        (wide_grad,) = torch.autograd.grad(live, leaf, (plain * flat[:, None]).to(plain.dtype))
        hidden_grad = _backward_up(wide_grad, hidden, pairs, narrow, stack)
        return hidden_grad, pairs.unsorted(weight_grad).to(weights.dtype), None, None, None


def _backward_down(
    plain: Tensor, grad: Tensor, gathered: Tensor, pairs: _Pairs, adapters: StackedAdapters, name: str
) -> Tensor:
    """Add to the gradient of h without the pair's weight; returns that of A2 h [P, rank]."""
    if adapters.separate:
        own = pairs.scaled(pairs.by_group(gathered, adapters.b(name)))
    else:
        own = pairs.owners.scaled(pairs.owners.product(grad, adapters.b(name))).index_select(0, pairs.tokens)
    plain += pairs.by_group(own, adapters.a([name]))
    return own


def _backward_up(
    wide_grad: Tensor, hidden: Tensor, pairs: _Pairs, narrow: Sequence[Tensor], stack: ExpertStack
) -> Tensor:
    """The gradient of the inputs [T, D]; adds those of A1, B1, A3 and B3."""
    names, views = stack.up_names, stack.up_views(wide_grad)
    terms, sums = pairs.by_expert(wide_grad, stack.up_weights.mT), list[Tensor]()
    for adapters in pairs.kinds:
        pieces = [pairs.by_group(view, adapters.b(name)) for name, view in zip(names, views, strict=True)]
        sums.append(pairs.scaled(torch.cat(pieces, dim=1)))
        if adapters.separate:
            terms += pairs.by_group(sums[-1], adapters.a(names))
    hidden_grad = pairs.sum_of_tokens(terms)
    for adapters, saved, own in zip(pairs.kinds, narrow, sums, strict=True):
        if adapters.separate:
            a_grads, of_pairs = pairs.outer(own, hidden.index_select(0, pairs.tokens)), saved
        else:
            of_tokens, of_pairs = pairs.sum_of_tokens(own), saved.index_select(0, pairs.tokens)
            hidden_grad += pairs.owners.product(of_tokens, adapters.a(names))
            a_grads = pairs.owners.outer(of_tokens, hidden)
        if not adapters.has_gradients:
            continue
        parts = zip(names, views, a_grads.chunk(len(names), 1), of_pairs.chunk(len(names), 1), strict=True)
        for name, view, a_grad, piece in parts:
            adapters.add_gradients(name, "a", a_grad)
            adapters.add_gradients(name, "b", pairs.outer(view, piece))
    return hidden_grad
