"""The kernel of packed attention in bfloat16, at every group of heads and at short and long rows, against float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tinsmith.engine.model import attention, flex_attention
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.packing import PackedRow, PackedTree, pack

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:flex_attention called without")]  # on a CPU

HEADS, WIDTH = 2, 64


@pytest.fixture
def dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def tree_of(length: int) -> PackedTree:
    """Two rows that share their first half."""
    draw = np.random.default_rng(length)
    first, second = draw.integers(3, 500, (2, length), dtype=np.int32)
    second[: length // 2] = first[: length // 2]
    return pack([PackedRow(key=key, adapter=0, tokens=row) for key, row in enumerate((first, second))])


def inputs(tree: PackedTree, group: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    counts = (HEADS * group, HEADS, HEADS)
    return [torch.randn(1, count, len(tree.tokens), WIDTH, device=device, dtype=dtype) for count in counts]


@pytest.fixture(scope="module", params=range(1, 9))
def group(request: pytest.FixtureRequest) -> int:
    """Query heads for each key head. Each has the variants of an engine of its own, whose number is limited."""
    torch._dynamo.reset()
    return int(request.param)


@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("length", [1, 36, 127, 128, 137, 385])
def test_packed_attention_equals_float32(
    group: int, window: int | None, length: int, device: str, dtype: torch.dtype
) -> None:
    tree, rule = tree_of(length), AttentionRule(WIDTH**-0.5, window=window)
    narrow = [tensor.requires_grad_(device == "cuda") for tensor in inputs(tree, group, device, dtype)]
    wide = [tensor.detach().float().requires_grad_(device == "cuda") for tensor in narrow]
    actual = flex_attention.packed_attention(tree, torch.device(device)).attend(
        0, narrow[0], narrow[1], narrow[2], rule
    )
    exact = attention.PackedAttention(tree, torch.float32, torch.device(device)).attend(
        0, wide[0], wide[1], wide[2], rule
    )
    torch.testing.assert_close(actual.float(), exact, atol=2e-2, rtol=2e-2)
    if device == "cuda":  # FlexAttention has no backward on CPUs
        weights = torch.randn_like(exact)
        (actual.float() * weights).sum().backward()
        (exact * weights).sum().backward()
        for left, right in zip(narrow, wide, strict=True):
            assert left.grad is not None
            torch.testing.assert_close(left.grad.float(), right.grad, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("cached", [1, 100, 300])
def test_attention_after_cached_prefix_equals_float32(
    group: int, window: int | None, cached: int, device: str, dtype: torch.dtype
) -> None:
    """The first row's beginning is cached, so that the second, which shares half of it, continues it too."""
    tree, rule = tree_of(385), AttentionRule(WIDTH**-0.5, window=window)
    query, key, value = inputs(tree, group, device, dtype)
    exact = attention.PackedAttention(tree, torch.float32, torch.device(device)).attend(
        0, query.float(), key.float(), value.float(), rule
    )

    def read(part: np.ndarray) -> list[tuple[Tensor, Tensor]]:
        return [(key[:, :, part], value[:, :, part])]

    first = tree.index[0][:cached]
    context = flex_attention.FlexAttention(
        tree, torch.device(device), cached=flex_attention.CachedKV(np.sort(first), read)
    )
    computed = np.setdiff1d(np.arange(len(tree.tokens)), first)
    with torch.no_grad():
        actual = context.attend(0, query[:, :, computed], key[:, :, computed], value[:, :, computed], rule)
    torch.testing.assert_close(actual.float(), exact[:, computed], atol=2e-2, rtol=2e-2)


def test_kernel_is_supported(device: str) -> None:
    assert flex_attention.is_supported(torch.device(device)) == (device == "cuda")
