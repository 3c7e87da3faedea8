"""Layers with other numbers and widths of key heads in one shape: attention is the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tinsmith.engine.model import attention, packing
from tinsmith.engine.model.architectures.uniform_kv import UniformKV, uniform_kv
from tinsmith.engine.model.attention_rule import AttentionRule


def context() -> attention.PackedAttention:
    rows = [packing.PackedRow(key=key, adapter=0, tokens=np.arange(3, 12 + key, dtype=np.int32)) for key in range(2)]
    return attention.PackedAttention(packing.pack(rows), torch.float32, torch.device("cpu"), save_kv=True)


@pytest.mark.parametrize(("heads", "key_width", "value_width"), [(1, 8, 8), (2, 24, 16), (4, 8, 16)])
def test_attention_and_gradients_are_those_of_the_own_shape(heads: int, key_width: int, value_width: int) -> None:
    """Fails if heads are repeated in another order than grouped-query attention reads them, or a width is cut."""
    draw, plain, padded = torch.Generator().manual_seed(0), context(), context()
    tokens = len(plain.tree.tokens)
    shapes = ((4, key_width), (heads, key_width), (heads, value_width))
    leaves = [torch.randn(1, count, tokens, width, generator=draw).requires_grad_() for count, width in shapes]
    rule, uniform = AttentionRule(0.3, window=5), UniformKV(4, 24, 16)
    query, key, value = leaves
    expected, actual = (each.attend(0, query, key, value, rule) for each in (plain, uniform.within(padded)))
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)
    grad = torch.randn(expected.shape, generator=draw)
    for own, plain_grad in zip(*(torch.autograd.grad(each, leaves, grad) for each in (actual, expected)), strict=True):
        torch.testing.assert_close(own, plain_grad, atol=1e-5, rtol=1e-5)
    ((keys, values),) = padded.saved_kv
    assert (keys.shape, values.shape) == ((1, 4, tokens, 24), (1, 4, tokens, 16))


def test_shape_is_that_of_the_widest_layer() -> None:
    def layer(heads: int, key_width: int, value_width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1, heads, 1, key_width), torch.zeros(1, heads, 1, value_width)

    assert uniform_kv([layer(2, 8, 8)] * 3) is None
    assert uniform_kv([layer(2, 8, 8), layer(4, 16, 8)]) == UniformKV(4, 16, 8)
    assert uniform_kv([layer(2, 8, 8), layer(3, 8, 8)]) is None
