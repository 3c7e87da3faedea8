"""The experts of a mixture one by one, with their adapters, forward and backward written by hand.

The frozen products are one for each expert over the tokens of all tenants, or one batched product (`pairs`), or one
call of a compiled function (`panels`). The terms of a token's output are added in float32 in the order of the experts'
numbers.

The backward adds the adapters' gradients to their gradient buffers, and returns the gradients of the inputs and of the
weights w, through which a router's inputs get theirs. `separate` computes adapters of another kind, in which no matrix
is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tinsmith.engine.lora.adapter import AdapterWeights, PlacedAdapter
from tinsmith.engine.lora.experts.pairs import Activations, AdapterPairs, ExpertPairs, blocks_of, sort_pairs
from tinsmith.engine.lora.experts.panels import fill_products, products_back
from tinsmith.engine.lora.experts.separate import add_gradients, add_products, is_separate
from tinsmith.engine.lora.experts.stack import ExpertStack


def outputs(
    hidden: Tensor, weights: Tensor, index: Tensor, stack: ExpertStack, placed: Sequence[PlacedAdapter]
) -> Tensor:
    """Weighted sums of the chosen experts' outputs: hidden [T, D], weights and expert ids [T, k] -> [T, D]."""
    if torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad):
        return _ExpertOutputs.apply(hidden, weights, index, stack, placed)  # type: ignore[no-any-return]
    return _forward(hidden, weights, _sorted(hidden, index, stack, placed), stack).output


def _sorted(hidden: Tensor, index: Tensor, stack: ExpertStack, placed: Sequence[PlacedAdapter]) -> ExpertPairs:
    """The pairs, padded where oneDNN multiplies."""
    pads = hidden.device.type == "cpu" and hidden.dtype == torch.bfloat16
    return sort_pairs(index, placed, experts=stack.count, pads=pads)


def _forward(hidden: Tensor, weights: Tensor, pairs: ExpertPairs, stack: ExpertStack) -> Activations:
    rows = hidden.index_select(0, pairs.tokens)
    wide = _up_products(rows, pairs, stack)
    narrow = [
        add_products(rows, stack.up_views(wide), stack.up_names, adapter)
        if is_separate(adapter.weights, stack.down_name)
        else _add_up(wide, hidden, adapter, stack)
        for adapter in pairs.adapters
    ]
    flat, weighted = pairs.sorted(weights), []
    # h times its weight before the product, which it is smaller than: the products of a token are then only added up.
    scaled = (stack.activate(wide) * flat[:, None]).to(hidden.dtype)
    outputs_of_pairs = _down_products(scaled, flat, pairs, stack)
    separate = {
        number: add_products(scaled, [outputs_of_pairs], [stack.down_name], adapter)
        for number, adapter in enumerate(pairs.adapters)
        if is_separate(adapter.weights, stack.down_name)
    }
    output = pairs.sum_of_tokens(outputs_of_pairs)
    for number, adapter in enumerate(pairs.adapters):
        if number in separate:
            weighted.append(separate[number])
            continue
        pair = adapter.weights.pairs[stack.down_name]
        weighted.append(adapter.sum_of_tokens(adapter.product(scaled, pair.a.mT)))
        output[adapter.rows].addmm_(weighted[-1], pair.b[0].T, alpha=adapter.weights.scale)
    return Activations(output, wide, narrow, weighted)


def _add_up(wide: Tensor, hidden: Tensor, adapter: AdapterPairs, stack: ExpertStack) -> Tensor:
    """Add an adapter's s B A x to the products before the gate; returns A x of its tokens."""
    narrow = hidden[adapter.rows] @ _stacked_a(adapter.weights, stack).T
    if not adapter.few:
        adapter.add_group_product(wide, narrow.index_select(0, adapter.local), _up_blocks(adapter, stack))
        return narrow
    views = stack.up_views(wide)
    for name, view, piece in zip(stack.up_names, views, narrow.chunk(len(views), dim=1), strict=True):
        adapter.add_product(view, piece[adapter.local], adapter.weights.pairs[name].b.mT)
    return narrow


def _up_blocks(adapter: AdapterPairs, stack: ExpertStack) -> Tensor:
    """B1 and B3 of each group as blocks of one matrix [groups, sites * rank, out], so that both are one product."""
    pairs, names = adapter.weights.pairs, stack.up_names
    rank = pairs[names[0]].b.shape[2]
    blocks = pairs[names[0]].b.new_zeros(len(adapter.runs), len(names) * rank, stack.width * len(names))
    for number, (name, view) in enumerate(zip(names, stack.up_views(blocks), strict=True)):
        view[:, number * rank : (number + 1) * rank] = pairs[name].b.index_select(0, adapter.run_experts).mT
    return blocks


def _up_products(rows: Tensor, pairs: ExpertPairs, stack: ExpertStack) -> Tensor:
    """The products before the gate of rows [P, in]."""
    if stack.panels is None:
        return _products(rows, stack.up_weights, pairs, stack.up_bias)
    wide = rows.new_empty(len(rows), len(stack.panels.up) * stack.width)
    fill_products(rows, stack.up_views(wide), stack.panels.up, pairs.experts)
    return wide


def _down_products(rows: Tensor, weights: Tensor, pairs: ExpertPairs, stack: ExpertStack) -> Tensor:
    """The products after the gate of rows [P, width], which are times the pairs' weights [P]."""
    if stack.panels is None:
        return _products(rows, stack.down_weights, pairs, stack.down_bias, weights)
    output = rows.new_empty(len(rows), stack.hidden)
    fill_products(rows, [output], stack.panels.down, pairs.experts)
    return output


def _down_products_back(grads: Tensor, pairs: ExpertPairs, stack: ExpertStack) -> Tensor:
    """Gradients of the rows of the products after the gate."""
    if stack.panels is None:
        return _products(grads, stack.down_weights.mT, pairs)
    return products_back([grads], stack.panels.down, pairs.experts)


def _up_products_back(grads: Tensor, pairs: ExpertPairs, stack: ExpertStack) -> Tensor:
    """Gradients of the rows of the products before the gate."""
    if stack.panels is None:
        return _products(grads, stack.up_weights.mT, pairs)
    return products_back(stack.up_views(grads), stack.panels.up, pairs.experts)


def _products(
    rows: Tensor, weights: Tensor, pairs: ExpertPairs, bias: Tensor | None = None, bias_factors: Tensor | None = None
) -> Tensor:
    """The frozen product of each pair's row [P, in] with its expert's matrix of [E, in, out].

    `bias` [E, out] is added to it, times `bias_factors` [P] if given.
    """
    if pairs.block:
        blocks = blocks_of(rows, pairs.block)
        if bias is None:
            return torch.bmm(blocks, weights).flatten(0, 1)
        added = bias[:, None]
        if bias_factors is not None:
            added = (blocks_of(bias_factors[:, None], pairs.block) * added).to(rows.dtype)
        return torch.baddbmm(added, blocks, weights).flatten(0, 1)  # rounded once, as below
    output = rows.new_empty(len(rows), weights.shape[2])
    for expert, start, stop in pairs.experts:
        target = output[start:stop]
        if bias is None:
            torch.mm(rows[start:stop], weights[expert], out=target)
        else:
            added = bias[expert]
            if bias_factors is not None:
                added = (bias_factors[start:stop, None] * added).to(rows.dtype)
            torch.addmm(added, rows[start:stop], weights[expert], out=target)
    return output


def _stacked_a(weights: AdapterWeights, stack: ExpertStack) -> Tensor:
    """A1 and A3 below each other [sites * rank, in]."""
    return weights.stacked_a(stack.up_names).flatten(0, -2)


class _ExpertOutputs(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor, index: Tensor, stack: ExpertStack, placed: Sequence[PlacedAdapter]
    ) -> Tensor:
        pairs = _sorted(hidden, index, stack, placed)
        result = _forward(hidden, weights, pairs, stack)
        ctx.save_for_backward(hidden, weights, result.wide, *result.narrow, *result.weighted)
        ctx.pairs, ctx.stack = pairs, stack
        return result.output

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (hidden, weights, wide, *saved), pairs, stack = ctx.saved_tensors, ctx.pairs, ctx.stack
        narrow, weighted = saved[: len(pairs.adapters)], saved[len(pairs.adapters) :]
        grad, flat = grads[0], pairs.sorted(weights)
        with torch.enable_grad():
            leaf = wide.detach().requires_grad_()
            live = stack.activate(leaf)
        activated = live.detach()
        gathered = grad.index_select(0, pairs.tokens)
        plain = _down_products_back(gathered, pairs, stack)  # without the pair's weight
        names, is_apart = [stack.down_name], [is_separate(each.weights, stack.down_name) for each in pairs.adapters]
        for adapter, mixed, apart in zip(pairs.adapters, weighted, is_apart, strict=True):
            if apart:
                add_gradients(plain, [gathered], activated, mixed, names, adapter, flat)
                continue
            _backward_down(plain, activated, grad, flat, adapter, mixed, stack.down_name)
        weight_grad = (plain * activated).sum(-1, dtype=pairs.sum_dtype(plain.dtype))
        if stack.down_bias is not None:
            weight_grad += (gathered * stack.down_bias[pairs.sorted_experts]).sum(-1, dtype=weight_grad.dtype)
        (wide_grad,) = torch.autograd.grad(live, leaf, (plain * flat[:, None]).to(plain.dtype))
        terms = _up_products_back(wide_grad, pairs, stack)
        for adapter, piece, apart in zip(pairs.adapters, narrow, is_apart, strict=True):
            if apart:
                rows = hidden.index_select(0, pairs.tokens)
                add_gradients(terms, stack.up_views(wide_grad), rows, piece, stack.up_names, adapter)
        hidden_grad = pairs.sum_of_tokens(terms)
        for adapter, piece, apart in zip(pairs.adapters, narrow, is_apart, strict=True):
            if not apart:
                _backward_up(hidden_grad, wide_grad, hidden, adapter, piece, stack)
        return hidden_grad, pairs.unsorted(weight_grad).to(weights.dtype), None, None, None


def _backward_down(
    plain: Tensor, activated: Tensor, grad: Tensor, flat: Tensor, adapter: AdapterPairs, mixed: Tensor, name: str
) -> None:
    """Add an adapter's part to the gradient of h without the pair's weight, and its gradients of A2 and B2."""
    weights, rows = adapter.weights, grad[adapter.rows]
    pair = weights.pairs[name]
    own_grad = (pair.b[0].T @ rows.T).T[adapter.local]  # the long side last, as in `AdapterSlice.backward`
    adapter.add_product(plain, own_grad, pair.a)
    if weights.gradients:
        buffer = weights.gradients[name]
        weighted = (own_grad * flat[adapter.positions, None]).to(own_grad.dtype)
        adapter.add_outer(buffer.a, adapter.outer(weighted, activated))
        buffer.b[0].T.add_(mixed.T @ rows, alpha=weights.scale)


def _backward_up(
    hidden_grad: Tensor, wide_grad: Tensor, hidden: Tensor, adapter: AdapterPairs, narrow: Tensor, stack: ExpertStack
) -> None:
    """Add an adapter's part to the gradient of the inputs, and its gradients of A1, B1, A3 and B3."""
    weights, names = adapter.weights, stack.up_names
    sums = adapter.sum_of_tokens(adapter.group_product(wide_grad, _up_blocks(adapter, stack).mT))
    hidden_grad[adapter.rows].addmm_(sums, _stacked_a(weights, stack), alpha=weights.scale)
    if not weights.gradients:
        return
    a_grads = (sums.T @ hidden[adapter.rows]).chunk(len(names))
    outer = adapter.outer(narrow.index_select(0, adapter.local), wide_grad)  # of which the blocks are gradients
    b_grads = [view.chunk(len(names), dim=1)[number] for number, view in enumerate(stack.up_views(outer))]
    for name, a_grad, b_grad in zip(names, a_grads, b_grads, strict=True):
        buffer = weights.gradients[name]
        buffer.a[0].add_(a_grad, alpha=weights.scale)
        adapter.add_outer(buffer.b.mT, b_grad)
