"""Adapters on slices of a projection's rows, and on GPT-2's transposed projections: outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tinsmith.engine.base import LoraSpec
from tinsmith.engine.lora.adapter import AdapterLayout, AdapterWeights
from tinsmith.engine.lora.linear import ActiveAdapters, LoraLinear
from tinsmith.engine.lora.targets import LinearTarget, RowSlice

INPUTS, OUTPUTS = 12, 24
SLICES = {
    "whole": (),
    "q, k, v": (RowSlice("q", 0, 6), RowSlice("k", 6, 12), RowSlice("v", 12, 24)),
    "without the last rows": (RowSlice("z", 0, 8), RowSlice("x", 8, 16)),
    "interleaved": (RowSlice("q", 0, 2, 4), RowSlice("v", 3, 6, 4)),
}


def trained(target: LinearTarget, rank: int, seed: int) -> tuple[AdapterLayout, Tensor, AdapterWeights]:
    layout = AdapterLayout(LoraSpec(rank=rank, seed=0, alpha=8), target.sites)
    flat = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gradients = layout.pairs(torch.zeros_like(flat))
    return layout, flat, AdapterWeights(layout.scale, layout.pairs(flat), gradients)


def merged(base: Any, target: LinearTarget, layout: AdapterLayout, flat: Tensor) -> Tensor:
    """The weight with the adapter's product added row by row."""
    weight = (base.weight.T if isinstance(base, Conv1D) else base.weight).detach().double().clone()
    for site in target.sites:
        pair = layout.pairs(flat)[site.name]
        delta = layout.scale * pair.b @ pair.a
        rows = next((rows for rows in target.slices if rows.name == site.name), RowSlice("", 0, OUTPUTS))
        block = OUTPUTS // rows.blocks
        places = [n * block + row for n in range(rows.blocks) for row in range(rows.start, rows.stop)]
        weight = weight.index_add(0, torch.tensor(places), delta)
    return weight


@pytest.mark.parametrize("count", [1, 6])  # one by one, and as a batch
@pytest.mark.parametrize("rank", [4, 9])
@pytest.mark.parametrize("slices", SLICES)
def test_slices_equal_merged_weights(slices: str, rank: int, count: int):
    torch.manual_seed(0)
    base = nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64)
    assert_equals_merged(base, LinearTarget("layer", "attn", INPUTS, OUTPUTS, SLICES[slices]), rank, count)


def test_transposed_projection_equals_merged_weights():
    torch.manual_seed(0)
    assert_equals_merged(Conv1D(OUTPUTS, INPUTS).double(), LinearTarget("layer", "mlp", INPUTS, OUTPUTS), 4, 1)


def assert_equals_merged(base: Any, target: LinearTarget, rank: int, count: int) -> None:
    active = ActiveAdapters()
    module = LoraLinear(base, target, active)
    adapters = [trained(target, rank, seed) for seed in range(count)]
    draw = torch.Generator().manual_seed(7)
    inputs = torch.randn(count * 5, INPUTS, generator=draw, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(count * 5, OUTPUTS, generator=draw, dtype=torch.float64)
    with active.using([(weights, 5 * n, 5 * n + 5) for n, (_, _, weights) in enumerate(adapters)]):
        output = module(inputs)
        output.backward(grad)
    for number, (layout, flat, weights) in enumerate(adapters):
        own = slice(5 * number, 5 * number + 5)
        leaf, flat = inputs[own].detach().requires_grad_(), flat.clone().requires_grad_()
        expected = leaf @ merged(base, target, layout, flat).T + base.bias.detach()
        expected.backward(grad[own])
        torch.testing.assert_close(output[own], expected)
        assert inputs.grad is not None
        assert flat.grad is not None
        torch.testing.assert_close(inputs.grad[own], leaf.grad)
        for name, pair in layout.pairs(flat.grad).items():
            torch.testing.assert_close(weights.gradients[name].a, pair.a)
            torch.testing.assert_close(weights.gradients[name].b, pair.b)
