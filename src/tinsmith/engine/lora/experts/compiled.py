"""The experts of a mixture with their adapters by compiled functions: all products of a site are one call.

The formulas are those of `install` and `separate`, but each pair of a token and an expert is multiplied by itself with
matrices that experts share. So neither the number of pairs of an expert nor that of adapters changes a pair's bits, and
nothing is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tinsmith.engine.lora.adapter import PlacedAdapter
from tinsmith.engine.lora.compiled_adapters import is_rank
from tinsmith.engine.lora.compiled_projections import AdapterTables, ProjectionCall, narrow_line, narrow_slot
from tinsmith.engine.lora.experts.pairs import AdapterPairs, ExpertPairs, sort_pairs
from tinsmith.engine.lora.experts.panels import ExpertPanels, fill_products, products_back
from tinsmith.engine.lora.experts.stack import ExpertStack


def serves(stack: ExpertStack, placed: Sequence[PlacedAdapter]) -> bool:
    """Whether compiled functions compute these experts under these adapters."""
    if stack.panels is None:
        return False
    names = (*stack.up_names, stack.down_name)
    adapted = [weights.pairs[name].a for weights, _, _ in placed for name in names]
    return all(is_rank(matrix.shape[1], matrix.dtype) for matrix in adapted)


def outputs(
    hidden: Tensor, weights: Tensor, index: Tensor, stack: ExpertStack, placed: Sequence[PlacedAdapter]
) -> Tensor:
    """As `loops.outputs`."""
    if torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad):
        return _CompiledOutputs.apply(hidden, weights, index, stack, placed)  # type: ignore[no-any-return]
    return _forward(hidden, weights, _Call.of(index, stack, placed)).output


@dataclass(frozen=True, slots=True)
class _Call:
    """A pass in one layer."""

    stack: ExpertStack
    panels: ExpertPanels
    pairs: ExpertPairs
    up: AdapterTables | None
    down: AdapterTables | None

    @classmethod
    def of(cls, index: Tensor, stack: ExpertStack, placed: Sequence[PlacedAdapter]) -> _Call:
        assert stack.panels is not None
        pairs = sort_pairs(index, placed)
        runs = [(start, stop, expert, each.weights) for each in pairs.adapters for expert, start, stop, _ in each.runs]
        runs.sort(key=lambda run: run[0])
        up, down = (
            AdapterTables.of_experts(runs, names) if runs else None for names in (stack.up_names, [stack.down_name])
        )
        return cls(stack, stack.panels, pairs, up, down)

    @property
    def is_trained(self) -> bool:
        return any(each.weights.gradients for each in self.pairs.adapters)

    def narrow(self, tables: AdapterTables | None, like: Tensor) -> Tensor | None:
        """Room for A x of all adapters, or its gradient; None where no adapter is trained."""
        return None if tables is None or not self.is_trained else like.new_empty(tables.narrow_size)

    @staticmethod
    def of_tokens(narrow: Tensor, tables: AdapterTables, adapter: AdapterPairs, rank: int) -> Tensor:
        """An adapter's part of narrow, summed over the experts of each of its tokens: [n, numbers of a row]."""
        line = narrow_line(tables.projections, rank)
        parts = [narrow.narrow(0, tables.offsets[start], (stop - start) * line) for _, start, stop, _ in adapter.runs]
        return adapter.sum_of_tokens(torch.cat(parts).view(-1, line))


@dataclass(frozen=True, slots=True)
class _Activations:
    """What the forward computes; all but `output` is for the backward."""

    output: Tensor
    """[T, D]."""
    wide: Tensor
    """[P, out]: the product before the gate, in the order of the pairs."""
    narrow_up: Tensor | None
    narrow_down: Tensor | None


def _forward(hidden: Tensor, weights: Tensor, call: _Call) -> _Activations:
    pairs, stack = call.pairs, call.stack
    rows, flat = hidden.index_select(0, pairs.tokens), pairs.sorted(weights)
    wide = rows.new_empty(len(rows), len(call.panels.up) * stack.width)
    narrow_up = call.narrow(call.up, rows)
    fill_products(rows, stack.up_views(wide), call.panels.up, pairs.experts, call.up, narrow_up)
    # h times its weight before the product, which it is smaller than: the products of a token are then only added up.
    scaled = (stack.activate(wide) * flat[:, None]).to(hidden.dtype)
    narrow_down, products = call.narrow(call.down, rows), torch.empty_like(rows)
    fill_products(scaled, [products], call.panels.down, pairs.experts, call.down, narrow_down)
    return _Activations(pairs.sum_of_tokens(products), wide, narrow_up, narrow_down)


class _CompiledOutputs(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor, index: Tensor, stack: ExpertStack, placed: Sequence[PlacedAdapter]
    ) -> Tensor:
        call = _Call.of(index, stack, placed)
        result = _forward(hidden, weights, call)
        ctx.save_for_backward(hidden, weights, result.wide, result.narrow_up, result.narrow_down)
        ctx.call = call
        return result.output

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (hidden, weights, wide, narrow_up, narrow_down), call = ctx.saved_tensors, ctx.call
        pairs, stack, panels, flat = call.pairs, call.stack, call.panels, call.pairs.sorted(weights)
        with torch.enable_grad():
            leaf = wide.detach().requires_grad_()
            live = stack.activate(leaf)
        activated, gathered = live.detach(), grads[0].index_select(0, pairs.tokens)
        narrow_grads = call.narrow(call.down, gathered)
        # without the pair's weight
        plain = products_back([gathered], panels.down, pairs.experts, call.down, narrow_grads)
        if narrow_down is not None:
            scaled = (activated * flat[:, None]).to(hidden.dtype)
            ProjectionCall(scaled, [gathered], None, call.down).add_gradients(narrow_down, narrow_grads)
            _add_shared_b(call, grads[0], narrow_down)
        weight_grad = (plain * activated).sum(-1, dtype=pairs.sum_dtype(plain.dtype))
        (wide_grad,) = torch.autograd.grad(live, leaf, (plain * flat[:, None]).to(plain.dtype))
        narrow_grads, views = call.narrow(call.up, gathered), stack.up_views(wide_grad)
        terms = products_back(views, panels.up, pairs.experts, call.up, narrow_grads)
        if narrow_up is not None:
            rows = hidden.index_select(0, pairs.tokens)
            ProjectionCall(rows, views, None, call.up).add_gradients(narrow_up, narrow_grads)
            _add_shared_a(call, hidden, narrow_grads)
        return pairs.sum_of_tokens(terms), pairs.unsorted(weight_grad).to(weights.dtype), None, None, None


def _add_shared_b(call: _Call, grad: Tensor, narrow: Tensor) -> None:
    """Add to the gradients of the matrices B2 that experts share; `grad` [T, D] is that of the outputs."""
    assert call.down is not None
    for adapter in call.pairs.adapters:
        weights, shared = adapter.weights, adapter.weights.pairs[call.stack.down_name].b
        if weights.gradients and len(shared) == 1:
            rank = shared.shape[2]
            mixed = call.of_tokens(narrow, call.down, adapter, rank)[:, :rank]
            buffer = weights.gradients[call.stack.down_name].b
            buffer[0].T.add_(mixed.T @ grad[adapter.rows], alpha=weights.scale)


def _add_shared_a(call: _Call, hidden: Tensor, narrow_grads: Tensor) -> None:
    """Add to the gradients of the matrices A1 and A3 that experts share."""
    assert call.up is not None
    for adapter in call.pairs.adapters:
        weights, shared = adapter.weights, adapter.weights.pairs[call.stack.up_names[0]].a
        if not weights.gradients or len(shared) > 1:
            continue
        rank, slot = shared.shape[1], narrow_slot(shared.shape[1])
        sums = call.of_tokens(narrow_grads, call.up, adapter, rank)
        for site, name in enumerate(call.stack.up_names):
            own = sums[:, site * slot : site * slot + rank]
            weights.gradients[name].a[0].add_(own.T @ hidden[adapter.rows], alpha=weights.scale)
