"""Attention as batched products against PyTorch's own, forward and backward, in float32: only the order differs."""

from __future__ import annotations

import pytest
import torch

from tinsmith.engine import folded


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("prefix", [0, 3, folded.KEPT_KEYS])  # chances kept, and computed again
def test_it_is_attention(prefix: int, causal: bool) -> None:
    if causal and prefix:
        pytest.skip("causal without a mask has no prefix")
    draw = torch.Generator().manual_seed(1)
    query = torch.randn(1, 6, 7, 8, generator=draw, requires_grad=True)
    key, value = (torch.randn(1, 2, prefix + 7, 8, generator=draw, requires_grad=True) for _ in range(2))
    allowed = torch.cat([torch.ones(7, prefix), torch.ones(7, 7).tril()], 1).bool()
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    slope = torch.randn(wanted.shape, generator=draw)
    wanted.backward(slope)
    given = None if causal else mask
    with torch.no_grad():
        found, kept = folded.forward(query, key, value, given, 0.3)
        slopes = folded.backward(slope, query, key, value, kept, given, 0.3)
    assert bool(kept.numel()) == (prefix + 7 <= folded.KEPT_KEYS)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for leaf, one in zip((query, key, value), slopes, strict=True):
        torch.testing.assert_close(one, leaf.grad, rtol=1e-4, atol=1e-5)
