"""Adapters that compiled functions compute against products in float64."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tinsmith.engine.cpu.instructions import has_pair_products
from tinsmith.engine.lora import compiled_adapters
from tinsmith.engine.lora.adapter import AdapterWeights, LoraPair
from tinsmith.engine.lora.adapter_groups import AdapterBatch, AdapterSlice
from tinsmith.engine.lora.compiled_adapters import CompiledSlice
from tinsmith.engine.lora.linear import group_adapters

pytestmark = pytest.mark.skipif(
    not has_pair_products(torch.device("cpu"), torch.bfloat16), reason="needs AVX512-BF16, no AMX, and Numba"
)
SCALE = 0.5
NEAR = 1e-2
"""Of the largest result: bfloat16 rounds narrow, its gradient and the results to 1/256 of a number."""


def adapter(rank: int, width: int, outputs: list[int], *, trained: bool = True) -> AdapterWeights:
    """Random A and B of projections "0", "1", ... of one input."""
    draw = torch.Generator().manual_seed(0)
    pairs, gradients = dict[str, LoraPair](), dict[str, LoraPair]()
    for number, columns in enumerate(outputs):
        a = torch.randn(rank, width, generator=draw).bfloat16() / 8
        pairs[str(number)] = LoraPair(a, torch.randn(columns, rank, generator=draw).bfloat16() / 8)
        gradients[str(number)] = LoraPair(torch.ones(rank, width), torch.ones(columns, rank))
    return AdapterWeights(SCALE, pairs, gradients if trained else {})


def numbers(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_near(actual: Tensor, wanted: Tensor) -> None:
    assert float((actual.double() - wanted).abs().max() / wanted.abs().max()) < NEAR


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("positions", "rank", "width", "outputs"),
    [
        (1, 16, 32, [32, 64]),
        (64, 16, 32, [32]),
        (65, 8, 64, [32, 96]),
        (130, 24, 96, [64, 32, 32]),
        (201, 32, 64, [96, 32]),
        (77, 40, 32, [64]),
        (90, 16, 64, [32, 64, 32]),
        (70, 32, 40, [32]),  # widths that no panel has: products
        (70, 32, 64, [32, 36]),
    ],
)
def test_outputs_and_gradients_match_float64(
    positions: int, rank: int, width: int, outputs: list[int], count: int
) -> None:
    weights, names = adapter(rank, width, outputs), [str(number) for number in range(len(outputs))]
    start, stop = 3, 3 + positions
    rows, inputs = slice(start, stop), numbers(stop + 2, width, 1)
    before = [numbers(stop + 2, columns, 2 + columns) for columns in outputs]
    grads = [numbers(stop + 2, columns, 3 + columns) for columns in outputs]
    results, input_grad = [each.clone() for each in before], numbers(stop + 2, width, 4)
    input_grad_before, compiled = input_grad.clone(), CompiledSlice(weights, start, stop)
    with threads(count):
        narrow = compiled.forward(inputs, results, names)
        compiled.backward(input_grad, grads, names, inputs, narrow)

    wanted, x = input_grad_before.double(), inputs[rows].double()
    for name, result, own, grad in zip(names, results, before, grads, strict=True):
        a, b, above = weights.pairs[name].a.double(), weights.pairs[name].b.double(), grad[rows].double()
        whole = own.double()
        whole[rows] += SCALE * x @ a.T @ b.T
        assert_near(result, whole)
        wanted[rows] += SCALE * above @ b @ a
        assert_near(weights.gradients[name].a, 1 + SCALE * (above @ b).T @ x)
        assert_near(weights.gradients[name].b, 1 + SCALE * above.T @ (x @ a.T))
    assert_near(input_grad, wanted)


def test_results_do_not_depend_on_threads() -> None:
    outputs, names = [96, 32], ["0", "1"]
    results = []
    for count in (1, 2):
        weights = adapter(16, 64, outputs)
        wide, grads = [numbers(300, n, 1) for n in outputs], [numbers(300, n, 2) for n in outputs]
        inputs, input_grad, compiled = numbers(300, 64, 3), numbers(300, 64, 4), CompiledSlice(weights, 0, 300)
        with threads(count):
            compiled.backward(input_grad, grads, names, inputs, compiled.forward(inputs, wide, names))
        buffers = [buffer for name in names for buffer in (weights.gradients[name].a, weights.gradients[name].b)]
        results.append([*wide, input_grad, *buffers])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_columns_of_a_wider_output_are_added_to() -> None:
    """As of a fused projection, whose slices are views; gradients may have no layout of their own."""
    weights, inputs, wide = adapter(16, 32, [32], trained=False), numbers(80, 32, 1), numbers(80, 96, 2)
    before, compiled = wide.clone(), CompiledSlice(weights, 0, 80)
    pair = weights.pairs["0"]
    assert compiled.forward(inputs, [wide[:, 32:64]], ["0"]).numel() == 0
    expected = before.double()
    expected[:, 32:64] += SCALE * inputs.double() @ pair.a.double().T @ pair.b.double().T
    assert_near(wide, expected)
    input_grad, ones = torch.zeros(80, 32, dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16).expand(80, 32)
    compiled.backward(input_grad, [ones], ["0"], None, None)
    assert_near(input_grad, SCALE * ones.double() @ pair.b.double() @ pair.a.double())


def test_adapters_outside_of_batches_are_compiled() -> None:
    weights, odd = adapter(16, 32, [32]), adapter(12, 32, [32])
    for own, compiled, kind in (
        (weights, True, CompiledSlice),
        (weights, False, AdapterSlice),
        (odd, True, AdapterSlice),
    ):
        assert [type(each) for each in group_adapters([(own, 0, 9)], compiled=compiled)] == [kind]
    batch = [(weights, 64 * number, 64 * (number + 1)) for number in range(4)]
    assert [type(each) for each in group_adapters(batch, compiled=True)] == [AdapterBatch]


def test_wrong_results_are_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cpu = torch.device("cpu")
    assert compiled_adapters.work_on(cpu, torch.bfloat16)
    assert not compiled_adapters.work_on(cpu, torch.float32)
    monkeypatch.setattr(CompiledSlice, "_call", lambda *_, **__: None)
    with caplog.at_level(logging.WARNING):
        assert not compiled_adapters.work_on(cpu, torch.bfloat16)
    assert "compiled adapters do not work here" in caplog.text
