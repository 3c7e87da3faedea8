"""Attention of one job as plain batched products: query heads that share a key head are folded into its rows.

On CPUs with bfloat16 products this is several times as fast as PyTorch's flash kernel, backward above all, which
computes in float32 there. What it costs is a matrix of chances [Hkv, G Q, K]: it is kept for the backward where it is
small, and computed again where it is not, so that memory grows with the length of a row and not with its square.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEPT_KEYS = 256
"""Jobs that look at no more keys keep their chances."""


def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """query [1, Hq, Q, D], key and value [1, Hkv, K, D], mask additive [Q, K], or None where
    every query sees all that is before the last Q keys and its own past among them.

    Returns [1, Hq, Q, D] and what the backward wants: the chances, or an empty tensor.
    """
    chances = _chances(query, key, mask, scale)
    output = torch.bmm(chances, value[0]).view(query.shape)
    return output, chances if key.shape[2] <= KEPT_KEYS else query.new_empty(0)


def backward(
    slope: Tensor, query: Tensor, key: Tensor, value: Tensor, kept: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value for `slope` [1, Hq, Q, D]."""
    chances = kept if kept.numel() else _chances(query, key, mask, scale)
    folded, slopes = _fold(query, key), _fold(slope, key)
    of_value = torch.bmm(chances.transpose(1, 2), slopes)
    of_scores = torch.ops.aten._softmax_backward_data(
        torch.bmm(slopes, value[0].transpose(1, 2)), chances, -1, chances.dtype
    ).mul_(scale)
    of_query = torch.bmm(of_scores, key[0]).view(query.shape)
    return of_query, torch.bmm(of_scores.transpose(1, 2), folded)[None], of_value[None]


def _chances(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[Hkv, G Q, K]; the scores' sums are float32 inside the product and the softmax."""
    queries, keys = query.shape[2], key.shape[2]
    scores = torch.bmm(_fold(query * scale, key), key[0].transpose(1, 2))
    by_query = scores.view(key.shape[1], -1, queries, keys)
    if mask is None:
        by_query[..., keys - queries :] += scores.new_full((queries, queries), float("-inf")).triu_(1)
    else:
        by_query += mask
    return torch.softmax(scores, -1)


def _fold(query: Tensor, key: Tensor) -> Tensor:
    """[1, Hq, Q, D] -> [Hkv, G Q, D]."""
    return query[0].reshape(key.shape[1], -1, query.shape[3])
