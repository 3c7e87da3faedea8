"""Attention over packed trees: split into kernel calls, and as batched products against PyTorch's own."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tinsmith.engine.cpu.calls import CompiledCalls
from tinsmith.engine.model import attention, packing, self_check
from tinsmith.engine.model.attention_kernels import (
    additive_mask,
    batched_attention,
    batched_attention_backward,
)
from tinsmith.engine.model.attention_rule import AttentionRule


def attended(tree: packing.PackedTree) -> tuple[int, list[torch.Tensor]]:
    """Number of calls, output and gradients of random query, key and value."""
    draw, total = torch.Generator().manual_seed(2), len(tree.tokens)
    leaves = [torch.randn(1, heads, total, 16, generator=draw).requires_grad_() for heads in (6, 2, 2)]
    context = attention.packed_attention(tree, torch.float32, torch.device("cpu"))
    assert isinstance(context, attention.PackedAttention)
    output = context.attend(0, leaves[0], leaves[1], leaves[2], AttentionRule(0.25))
    output.backward(torch.randn(output.shape, generator=draw))
    calls = context.calls(AttentionRule(0.25))
    return len(calls), [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def test_masked_job_split_into_calls_gives_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [np.arange(700), np.r_[:40, 1000:1600], np.r_[:40, 1000:1100, 2000:2500], np.r_[:40, 3000:3020]]
    tree = packing.pack(
        [packing.PackedRow(key=key, adapter=0, tokens=row.astype(np.int32)) for key, row in enumerate(rows)]
    )
    few, actual = attended(tree)
    monkeypatch.setattr(attention, "MASKED_CALL_QUERIES", 10**6)
    whole, wanted = attended(tree)
    assert whole == len(tree.jobs) == 4
    assert few == 1 + 3 + 2 + 1
    for left, right in zip(actual, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fault", [lambda *_: torch.zeros(1, 4, 89, 16), lambda *_: 1 / 0])
def test_compiled_attention_that_fails_is_not_used(
    fault: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch, own_log: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("numba")
    with own_log.at_level(logging.WARNING):
        assert self_check._compiled_attention_works(torch.float32, gradients=True)
        assert not own_log.records
        monkeypatch.setattr(CompiledCalls, "forward", fault)
        assert not self_check._compiled_attention_works(torch.float32, gradients=True)
    assert "compiled attention does not work here" in own_log.text


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("prefix", [0, 3, 300])
def test_batched_attention_matches_pytorch(prefix: int, causal: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    query = torch.randn(1, 6, 7, 8, generator=draw, requires_grad=True)
    key, value = (torch.randn(1, 2, prefix + 7, 8, generator=draw, requires_grad=True) for _ in range(2))
    allowed = torch.cat([torch.ones(7, prefix), torch.ones(7, 7).tril()], 1).bool()
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    output_grad = torch.randn(wanted.shape, generator=draw)
    wanted.backward(output_grad)
    additive = additive_mask(np.tri(7, dtype=bool), query.dtype, query.device) if causal else mask
    with torch.no_grad():
        actual = batched_attention(query, key, value, additive, AttentionRule(0.3))
        grads = batched_attention_backward(output_grad, query, key, value, additive, AttentionRule(0.3))
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    for leaf, grad in zip((query, key, value), grads, strict=True):
        torch.testing.assert_close(grad, leaf.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [((), 300), ((), 17), ((0, 40), 200)])
def test_job_split_into_calls_is_close_to_one_call(lengths: tuple[tuple[int, ...], int]) -> None:
    """Rows split into several calls in bfloat16, against one call in float32."""
    prompt = np.arange(lengths[0][1] if lengths[0] else 0, dtype=np.int32)
    rows = [np.append(prompt, np.full(lengths[1], 1000 + end)).astype(np.int32) for end in range(2)]
    tree = packing.pack([packing.PackedRow(key=key, adapter=0, tokens=row) for key, row in enumerate(rows)])
    draw, total = torch.Generator().manual_seed(2), len(tree.tokens)
    inputs = [torch.randn(1, heads, total, 16, generator=draw).bfloat16() for heads in (6, 2, 2)]
    output_grad, results = torch.randn(1, total, 6, 16, generator=draw).bfloat16(), []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        context = attention.packed_attention(tree, dtype, torch.device("cpu"))
        output = context.attend(0, leaves[0], leaves[1], leaves[2], AttentionRule(0.25))
        output.backward(output_grad.to(dtype))
        results.append([output.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)])
    for exact, rounded in zip(*results, strict=True):
        assert float((exact - rounded).norm() / exact.norm()) < 0.02
