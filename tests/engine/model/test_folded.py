"""Attention as batched products against PyTorch's own, forward and backward, in float32: only the order differs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tinsmith.engine.model import attention, packing
from tinsmith.engine.model import attention as folded


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("prefix", [0, 3, folded.MAX_SAVED_KEYS])  # chances kept, and computed again
def test_it_is_attention(prefix: int, causal: bool) -> None:
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
    given = attention.additive_mask(folded.causal_mask(7, prefix + 7), query.dtype, query.device) if causal else mask
    with torch.no_grad():
        found, kept = folded.batched_attention(query, key, value, given, 0.3)
        slopes = folded.batched_attention_backward(slope, query, key, value, kept, given, 0.3)
    assert bool(kept.numel()) == (prefix + 7 <= folded.MAX_SAVED_KEYS)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for leaf, one in zip((query, key, value), slopes, strict=True):
        torch.testing.assert_close(one, leaf.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [((), 300), ((), 17), ((0, 40), 200)])
def test_pieces_of_a_job_are_the_job(lengths: tuple[tuple[int, ...], int]) -> None:
    """Rows cut where their scores would not fit the cache, in bfloat16, against one call in float32."""
    prompt = np.arange(lengths[0][1] if lengths[0] else 0, dtype=np.int32)
    rows = [np.append(prompt, np.full(lengths[1], 1000 + end)).astype(np.int32) for end in range(2)]
    tree = packing.pack([packing.PackedRow(key=key, adapter=0, tokens=row) for key, row in enumerate(rows)])
    draw, total = torch.Generator().manual_seed(2), len(tree.tokens)
    inputs = [torch.randn(1, heads, total, 16, generator=draw).bfloat16() for heads in (6, 2, 2)]
    slope, found = torch.randn(1, total, 6, 16, generator=draw).bfloat16(), []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [one.to(dtype).requires_grad_() for one in inputs]
        context = attention.packed_attention(tree, dtype, torch.device("cpu"))
        output = context.attend(0, leaves[0], leaves[1], leaves[2], 0.25)
        output.backward(slope.to(dtype))
        found.append([output.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)])
    for exact, rounded in zip(*found, strict=True):
        assert float((exact - rounded).norm() / exact.norm()) < 0.02
