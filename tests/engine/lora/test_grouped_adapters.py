"""Adapters of many tenants as grouped products equal the adapters computed one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tinsmith.engine.base import LoraSpec
from tinsmith.engine.lora import grouped_adapters, linear
from tinsmith.engine.lora.adapter import AdapterLayout, AdapterWeights, PlacedAdapter
from tinsmith.engine.lora.linear import ActiveAdapters, LoraLinear
from tinsmith.engine.lora.targets import LinearTarget, RowSlice

INPUTS, OUTPUTS = 16, 48
TARGETS = (
    LinearTarget("layer", "mlp", INPUTS, OUTPUTS),
    LinearTarget("layer", "attn", INPUTS, OUTPUTS, (RowSlice("q", 0, 8), RowSlice("k", 8, 16), RowSlice("v", 16, 48))),
    LinearTarget("layer", "attn", INPUTS, OUTPUTS, (RowSlice("q", 0, 4, 4), RowSlice("v", 6, 12, 4))),
)
GROUPED_MM = functional.grouped_mm
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}

Tenant = tuple[int, int, int, int]
"""Positions without an adapter before it, its own, its rank and its alpha."""
TENANTS = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 2]),
        st.sampled_from([0, 1, 1, 3, 17]),
        st.sampled_from([1, 8, 9]),
        st.sampled_from([8, 12]),
    ),
    min_size=1,
    max_size=9,
)


def aligned_grouped_mm(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
    """What a GPU refuses is refused here too."""
    for tensor in (left, right):
        assert sorted(tensor.stride())[0] == 1
        assert not any(stride % 8 for stride in tensor.stride() if stride != 1)
        assert not tensor.storage_offset() % 8
    return GROUPED_MM(left, right, offs=offs)


def placed_tenants(
    tenants: Sequence[Tenant], target: LinearTarget, dtype: torch.dtype
) -> tuple[list[PlacedAdapter], int]:
    placed, start = list[PlacedAdapter](), 0
    for seed, (before, length, rank, alpha) in enumerate(tenants):
        start += before
        layout = AdapterLayout(LoraSpec(rank=rank, seed=seed, alpha=alpha), target.sites)
        flat = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed)) / rank
        gradients = layout.pairs(torch.zeros_like(flat)) if seed % 4 != 3 else {}  # some only sample
        placed.append((AdapterWeights(layout.scale, layout.pairs(flat.to(dtype)), gradients), start, start + length))
        start += length
    return placed, start + 1


def results(
    placed: Sequence[PlacedAdapter], module: nn.Module, active: ActiveAdapters, count: int, dtype: torch.dtype
) -> list[Tensor]:
    """Outputs, the gradient of the inputs, and those of the adapters, which are cleared."""
    draw = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, INPUTS, generator=draw).to(dtype).requires_grad_()
    grad = torch.randn(count, OUTPUTS, generator=draw).to(dtype)
    with active.using(placed):
        output = module(inputs)
        output.backward(grad)
    assert inputs.grad is not None
    tensors = [output.detach(), inputs.grad]
    for weights, _, _ in placed:
        for pair in weights.gradients.values():
            tensors += [pair.a.clone(), pair.b.clone()]
            pair.a.zero_()
            pair.b.zero_()
    return tensors


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("target", TARGETS, ids=["whole", "q, k, v", "interleaved"])
@settings(max_examples=15, deadline=None)
@given(tenants=TENANTS)
def test_groups_equal_adapters_alone(target: LinearTarget, dtype: torch.dtype, tenants: list[Tenant]):
    torch.manual_seed(0)
    active = ActiveAdapters()
    module = LoraLinear(nn.Linear(INPUTS, OUTPUTS, dtype=dtype), target, active)
    placed, count = placed_tenants(tenants, target, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "MIN_BATCH_ADAPTERS", 99)
        expected = results(placed, module, active, count, dtype)
        patch.setattr(grouped_adapters, "has_grouped_products", lambda _: True)
        patch.setattr(functional, "grouped_mm", aligned_grouped_mm)
        actual = results(placed, module, active, count, dtype)
        again = results(placed, module, active, count, dtype)
    for left, right, repeated in zip(actual, expected, again, strict=True):
        scale = float(right.float().abs().max()) + 1e-3
        assert float((left.float() - right.float()).abs().max()) <= TOLERANCE[dtype] * scale
        torch.testing.assert_close(left, repeated, rtol=0, atol=0)


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> tuple[ActiveAdapters, Any]:
    monkeypatch.setattr(grouped_adapters, "has_grouped_products", lambda _: True)
    active = ActiveAdapters()
    return active, LoraLinear(nn.Linear(INPUTS, OUTPUTS, dtype=torch.bfloat16), TARGETS[1], active)


def stacks_of(active: ActiveAdapters) -> list[int]:
    return [matrix.data_ptr() for each in active._served.now.stacks for matrix in each.matrices.values()]


def test_same_adapters_use_their_stacks_again(grouped: Any):
    active, module = grouped
    placed, count = placed_tenants([(0, 2, 8, 8)] * 3, TARGETS[1], torch.bfloat16)
    results(placed, module, active, count, torch.bfloat16)
    first = stacks_of(active)
    moved = [(weights, start + 1, stop + 1) for weights, start, stop in placed]
    before = results(moved, module, active, count, torch.bfloat16)
    assert first == stacks_of(active) != []
    active.release_memory()
    assert stacks_of(active) == []
    for left, right in zip(before, results(moved, module, active, count, torch.bfloat16), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_new_weights_get_new_stacks(grouped: Any):
    active, module = grouped
    old, count = placed_tenants([(0, 2, 8, 8)] * 3, TARGETS[1], torch.bfloat16)
    new, _ = placed_tenants([(0, 2, 8, 12)] * 3, TARGETS[1], torch.bfloat16)
    mixed = [old[0], new[1], old[2]]
    expected = results(old, module, active, count, torch.bfloat16)
    changed = results(mixed, module, active, count, torch.bfloat16)
    assert not torch.equal(changed[0], expected[0])
    for left, right in zip(results(old, module, active, count, torch.bfloat16), expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_stacks_beyond_their_memory_are_made_again(grouped: Any, monkeypatch: pytest.MonkeyPatch):
    active, module = grouped
    placed, count = placed_tenants([(0, 2, 8, 8)] * 3, TARGETS[1], torch.bfloat16)
    expected = results(placed, module, active, count, torch.bfloat16)
    active.release_memory()
    monkeypatch.setattr(grouped_adapters, "STACK_BYTES", 1000)
    for left, right in zip(results(placed, module, active, count, torch.bfloat16), expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)
    assert sum(each.bytes for each in active._served.now.stacks) <= 1000


def test_odd_widths_and_cpus_have_no_groups(monkeypatch: pytest.MonkeyPatch):
    placed, _ = placed_tenants([(0, 2, 8, 8)] * 3, TARGETS[0], torch.bfloat16)
    assert grouped_adapters.group_adapters(placed, ()) == ([], placed)
    monkeypatch.setattr(grouped_adapters, "has_grouped_products", lambda _: True)
    placed, _ = placed_tenants([(0, 2, 8, 8)] * 3, LinearTarget("layer", "mlp", 12, 16), torch.bfloat16)
    assert grouped_adapters.group_adapters(placed, ()) == ([], placed)
