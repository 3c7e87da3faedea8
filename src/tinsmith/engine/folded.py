"""Attention of one job as plain batched products: query heads that share a key head are folded into its rows.

On CPUs with bfloat16 products this is several times as fast as PyTorch's flash kernel, backward above all, which
computes in float32 there. What it costs is a matrix of chances [Hkv, G Q, K]: it is kept for the backward where it is
small, and computed again where it is not, so that memory grows with the length of a row and not with its square.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

KEPT_KEYS = 256
"""Jobs that look at no more keys keep their chances."""


def past(queries: int, keys: int) -> np.ndarray:
    """bool [queries, M]: whether the last queries of a sequence see its last M keys; all of them see those before."""
    width = keys if keys <= KEPT_KEYS else queries  # what is masked is added faster to whole rows than to their ends
    return np.tri(queries, width, width - queries, dtype=bool)


def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """query [1, Hq, Q, D], key and value [1, Hkv, K, D]; mask additive [Q, M], for the last M keys.

    Returns [1, Hq, Q, D] and what the backward wants: the chances, or an empty tensor.
    """
    chances = _chances(_fold(query * scale, key), key, mask)
    output = torch.bmm(chances, value[0]).view(query.shape)
    return output, chances if key.shape[2] <= KEPT_KEYS else query.new_empty(0)


def backward(
    slope: Tensor, query: Tensor, key: Tensor, value: Tensor, kept: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value for `slope` [1, Hq, Q, D]."""
    folded, slopes = _fold(query * scale, key), _fold(slope, key)
    chances = kept if kept.numel() else _chances(folded, key, mask)
    of_value = torch.bmm(chances.transpose(1, 2), slopes)
    of_scores = torch.bmm(slopes, value[0].transpose(1, 2))
    torch.ops.aten._softmax_backward_data.out(of_scores, chances, -1, chances.dtype, grad_input=of_scores)
    of_query = torch.bmm(of_scores, key[0]).mul_(scale).view(query.shape)
    return of_query, torch.bmm(of_scores.transpose(1, 2), folded)[None], of_value[None]


def _chances(folded: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """[Hkv, G Q, K] of scaled queries [Hkv, G Q, D]; sums are float32 inside the product and the softmax."""
    scores = torch.bmm(folded, key[0].transpose(1, 2))
    queries, masked = mask.shape
    scores.view(key.shape[1], -1, queries, key.shape[2])[..., key.shape[2] - masked :] += mask
    return torch.softmax(scores, -1, out=scores)


def _fold(query: Tensor, key: Tensor) -> Tensor:
    """[1, Hq, Q, D] -> [Hkv, G Q, D]."""
    return query[0].reshape(key.shape[1], -1, query.shape[3])
