"""Adapters whose experts have both matrices of their own, as PEFT trains them.

Each product has one row for each pair of a token and an expert; some of those in `loops` have one for each token:

    g_e = G_e x + s B1_e A1_e x     u_e = U_e x + s B3_e A3_e x     y = sum_e w_e (D_e h_e + s B2_e A2_e h_e)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinsmith.engine.lora.adapter import AdapterWeights
from tinsmith.engine.lora.experts.pairs import AdapterPairs


def is_separate(weights: AdapterWeights, down_name: str) -> bool:
    """Whether the experts of a layer share no matrix of the adapter."""
    return len(weights.pairs[down_name].b) > 1


def add_products(rows: Tensor, targets: Sequence[Tensor], names: Sequence[str], adapter: AdapterPairs) -> Tensor:
    """Add s B A x of rows x [P, in] to the products [P, out] of these sites; returns A x [P', sites * rank]."""
    pieces = []
    for name, target in zip(names, targets, strict=True):
        pair = adapter.weights.pairs[name]
        pieces.append(adapter.product(rows, pair.a.mT))
        adapter.add_product(target, pieces[-1], pair.b.mT)
    return torch.cat(pieces, dim=1)


def add_gradients(
    input_grad: Tensor,
    grads: Sequence[Tensor],
    rows: Tensor,
    narrow: Tensor,
    names: Sequence[str],
    adapter: AdapterPairs,
    pair_weights: Tensor | None = None,
) -> None:
    """Add to the gradient of the rows [P, in], and to the adapter's gradients of A and B at these sites.

    `narrow` is what `add_products` returned. With `pair_weights` [P], it is of rows times these weights, and the
    gradients [P, out] are those of the weighted sum; the rows' own gradient is without the weights.
    """
    weights = adapter.weights
    own_weights = None if pair_weights is None else pair_weights[adapter.positions, None]
    for name, grad, piece in zip(names, grads, narrow.chunk(len(names), dim=1), strict=True):
        pair = weights.pairs[name]
        own_grad = adapter.product(grad, pair.b)
        adapter.add_product(input_grad, own_grad, pair.a)
        if not weights.gradients:
            continue
        if own_weights is not None:
            own_grad = (own_grad * own_weights).to(own_grad.dtype)
        buffer = weights.gradients[name]
        adapter.add_outer(buffer.a, adapter.outer(own_grad, rows))
        adapter.add_outer(buffer.b.mT, adapter.outer(piece, grad))
