"""The compiled products of the output head against products in float64."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from tests.engine.cpu.processor import each_dtype, needs_panels
from tinsmith.engine.lora.head import choice
from tinsmith.engine.lora.head.products import Addition, CompiledProducts, Float32Products
from tinsmith.engine.threads.compute import pytorch_threads


def additions_of(width: int, words: int, spans: list[tuple[int, int, int]]) -> list[Addition]:
    """Additions of (start, stop, rank)."""
    draw = torch.Generator().manual_seed(width)
    return [
        Addition(start, stop, torch.randn(rank, width, generator=draw) * width**-0.5,
                 torch.randn(words, rank, generator=draw), 0.5 + start)
        for start, stop, rank in spans
    ]  # fmt: skip


def exact(hidden: Tensor, weight: Tensor, additions: list[Addition], bias: Tensor | None) -> Tensor:
    """The products in float64."""
    products = hidden.double() @ weight.double().T
    for each in additions:
        products[each.start : each.stop] += (
            each.scale * hidden[each.start : each.stop].double() @ each.a.double().T @ each.b.double().T
        )
    return products if bias is None else products + bias.double()


@each_dtype
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("rows", "words", "width", "spans"),
    [
        (1, 32, 8, []),
        (3, 31, 64, [(0, 3, 4)]),
        (21, 96, 576, [(0, 21, 32)]),
        (29, 300, 56, [(0, 1, 16), (1, 14, 33), (20, 29, 1)]),
        (16, 257, 40, [(4, 12, 20)]),
    ],
)
def test_products_are_exact_to_float32(
    rows: int, words: int, width: int, spans: list[tuple[int, int, int]], threads: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randn(count, width, generator=draw).to(dtype) for count in (words, rows))
    bias, additions = torch.randn(words, generator=draw), additions_of(width, words, spans)
    with pytorch_threads(threads):
        for own in (None, bias):
            actual = CompiledProducts(weight, own)(hidden, additions)
            wanted = exact(hidden, weight, additions, own)
            torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-5 * width**0.5)


@each_dtype
def test_rows_are_alike_however_many_are_computed(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randn(count, 64, generator=draw).to(dtype) for count in (500, 23))
    (addition,) = additions_of(64, 500, [(0, 23, 40)])
    products = CompiledProducts(weight, None)
    together = products(hidden, [addition])
    for row in range(len(hidden)):
        own = Addition(0, 1, addition.a, addition.b, addition.scale)
        assert torch.equal(products(hidden[row : row + 1], [own])[0], together[row])


@each_dtype
def test_rows_that_are_not_contiguous(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, wide = torch.randn(40, 64, generator=draw).to(dtype), torch.randn(5, 128, generator=draw).to(dtype)
    hidden = wide[:, :64]
    actual = CompiledProducts(weight, None)(hidden)
    torch.testing.assert_close(actual.double(), exact(hidden, weight, [], None), rtol=1e-5, atol=1e-4)


@each_dtype
def test_wrong_products_are_not_used(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.randn(40, 64).to(dtype)
    assert isinstance(choice.products_of(weight, None), CompiledProducts)
    monkeypatch.setattr(
        CompiledProducts, "__call__", lambda self, hidden, _: torch.zeros(len(hidden), len(self._weight))
    )
    with caplog.at_level(logging.WARNING):
        assert isinstance(choice.products_of(weight, None), Float32Products)
    assert "compiled products of the output head do not work here" in caplog.text


@each_dtype
def test_other_widths_are_multiplied_by_float32_copies(dtype: torch.dtype) -> None:
    assert isinstance(choice.products_of(torch.randn(40, 63).to(dtype), None), Float32Products)


@needs_panels
@pytest.mark.parametrize("rows", [1, 16, 17])
def test_few_rows_of_a_bfloat16_head_read_two_bytes_a_weight(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bfloat16 is not multiplied in pairs; the copy differs from the weights here, so that the products show
    which was read."""
    monkeypatch.setattr(choice, "panel_kind", lambda _, dtype: "float32" if dtype == torch.float32 else None)
    weight, hidden = torch.randn(45, 64).bfloat16(), torch.randn(rows, 64).bfloat16()
    additions = additions_of(64, 45, [(0, rows, 5)])
    wanted = exact(hidden, weight, additions, None)
    products = choice.products_of(weight, None)
    assert isinstance(products, Float32Products)
    torch.testing.assert_close(products(hidden, additions).double(), wanted, rtol=1e-5, atol=1e-4)
    products._few = CompiledProducts(2 * weight.float(), None)
    is_other = bool((products(hidden).double() - 2 * exact(hidden, weight, [], None)).abs().max() < 1e-3)
    assert is_other == (rows <= 16)
