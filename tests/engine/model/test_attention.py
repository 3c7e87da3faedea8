"""Long rows behind a shared prefix are attended in pieces, which are the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tinsmith.engine.model import attention, packing


def attended(tree: packing.PackedTree) -> tuple[int, list[torch.Tensor]]:
    """Of random heads: how many pieces, the output and the three gradients."""
    draw, total = torch.Generator().manual_seed(2), len(tree.tokens)
    leaves = [torch.randn(1, heads, total, 16, generator=draw).requires_grad_() for heads in (6, 2, 2)]
    context = attention.packed_attention(tree, torch.float32, torch.device("cpu"))
    assert isinstance(context, attention.PackedAttention)
    output = context.attend(0, leaves[0], leaves[1], leaves[2], 0.25)
    output.backward(torch.randn(output.shape, generator=draw))
    return len(context.calls), [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def test_a_masked_job_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [np.arange(700), np.r_[:40, 1000:1600], np.r_[:40, 1000:1100, 2000:2500], np.r_[:40, 3000:3020]]
    tree = packing.pack(
        [packing.PackedRow(key=key, adapter=0, tokens=row.astype(np.int32)) for key, row in enumerate(rows)]
    )
    few, found = attended(tree)
    monkeypatch.setattr(attention, "MASKED_CALL_QUERIES", 10**6)
    whole, wanted = attended(tree)
    assert whole == len(tree.jobs) == 4
    assert few == 1 + 3 + 2 + 1
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
