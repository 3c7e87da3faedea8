"""4-bit matrices that stay decoded from a forward to its backward, without bitsandbytes: its blocks are a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinsmith.engine.lora import quantized_linear
from tinsmith.engine.lora.linear import Projection, project
from tinsmith.engine.lora.quantized_linear import DecodedMemory, QuantizedLinear, keep_decoded

OUTPUTS, INPUTS = 12, 8
BYTES = OUTPUTS * INPUTS * 4


class Blocks(QuantizedLinear):
    """A matrix whose decodings are counted."""

    def __init__(self, seed: int) -> None:
        matrix = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(seed))
        super().__init__(Weight(matrix), torch.ones(OUTPUTS), (OUTPUTS, INPUTS))
        self.decodings = 0

    def _matrix(self) -> Tensor:
        self.decodings += 1
        return self._weight.clone()


class Weight:
    """What is read of bitsandbytes' Params4bit."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.device = matrix, matrix.device
        self.quant_state = SimpleNamespace(dtype=matrix.dtype)

    def detach(self) -> Tensor:
        return self.matrix


@pytest.fixture(autouse=True)
def decode_few_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "FEW_ROWS", 0)


def passed(products: list[Blocks], rows: int = 5) -> tuple[Tensor, Tensor]:
    """The outputs of all products on the same input, and its gradient."""
    inputs = torch.linspace(-1, 1, rows * INPUTS).view(rows, INPUTS).requires_grad_()
    outputs = project(inputs, [Projection(str(number), each) for number, each in enumerate(products)], [])
    torch.cat(outputs, dim=1).square().sum().backward()
    assert inputs.grad is not None
    return torch.cat(outputs, dim=1).detach(), inputs.grad


@pytest.mark.parametrize(("limit", "lasting"), [(0, 0), (BYTES, 1), (2 * BYTES + 1, 2), (10**6, 3)])
def test_matrices_stay_decoded_as_far_as_memory_allows(limit: int, lasting: int) -> None:
    """The results have the same bits. To break it: leave out `take` in `for_backward`."""
    plain, products = [Blocks(seed) for seed in range(3)], [Blocks(seed) for seed in range(3)]
    keep_decoded(products, limit)
    for _ in range(2):
        for actual, expected in zip(passed(products), passed(plain), strict=True):
            assert torch.equal(actual, expected)
        assert products[0].memory.taken == 0
    assert sum(each.decodings for each in plain) == 2 * 6
    assert sum(each.decodings for each in products) == 2 * (6 - lasting)
    assert [each.products for each in products] == [each.products for each in plain]


def test_dropped_graph_gives_its_memory_back() -> None:
    product = Blocks(0)
    keep_decoded([product, object()], BYTES)
    outputs = project(torch.ones(3, INPUTS, requires_grad=True), [Projection("a", product)], [])
    assert product.memory.taken == BYTES
    del outputs
    assert product.memory.taken == 0


def test_layers_below_take_the_memory_of_those_above() -> None:
    """Within one backward, as where layers are recomputed. To break it: keep `ctx.projections` after the backward."""
    first, second = Blocks(0), Blocks(1)
    first.memory = second.memory = memory = DecodedMemory(BYTES)

    def layer(inputs: Tensor, product: Blocks) -> Tensor:
        return project(inputs, [Projection("a", product)], [])[0][:, :INPUTS]

    inputs: Any = torch.ones(3, INPUTS, requires_grad=True)
    for product in (first, second):
        inputs = checkpoint(layer, inputs, product, use_reentrant=True)
    inputs.sum().backward()
    assert memory.taken == 0
    assert (first.decodings, second.decodings) == (2, 2)  # the forward, and the recomputed one with its backward


def test_nothing_is_kept_without_a_backward() -> None:
    product = Blocks(0)
    keep_decoded([product], BYTES)
    with torch.no_grad():
        outputs = project(torch.ones(3, INPUTS), [Projection("a", product)], [])
    assert product.memory.taken == 0
    assert len(outputs) == product.decodings == 1
