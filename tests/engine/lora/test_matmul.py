"""Ordered matrices compute what plain ones do, both ways, and are left plain where memory is short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tinsmith.engine import autotune
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.lora import linear
from tinsmith.engine.lora.matmul import FrozenLinear
from tinsmith.engine.model import loading


@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_both_ways_are_those_of_float64(dtype: torch.dtype, tolerance: float, biased: bool, rows: int):
    draw = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(48, 80, generator=draw).to(dtype), torch.randn(48, generator=draw).to(dtype)
    inputs, slopes, onto = (torch.randn(rows, width, generator=draw).to(dtype) for width in (80, 48, 80))
    wide = weight.double()
    forth = inputs.double() @ wide.T + (bias.double() if biased else 0)
    back = slopes.double() @ wide
    plain = FrozenLinear(weight, bias if biased else None)
    for fixed in (plain, FrozenLinear(weight, bias if biased else None).reorder()):
        for found, exact in (
            (fixed(inputs), forth),
            (fixed.backward(slopes), back),
            (fixed.backward(slopes, onto=onto.clone()), onto.double() + back),
        ):
            assert (found.double() - exact).abs().max() <= tolerance * exact.abs().max()
            assert found.dtype == dtype


def test_matrices_are_ordered_where_there_is_room_for_them_twice(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch):
    base = loading.load(EngineConfig(source=str(tiny_llama), dtype="float32", device="cpu"))
    linear.adapt(base)
    products = [module.frozen for module in base.model.modules() if isinstance(module, linear.LoraLinear)]
    size = sum(one.shape.numel() * 4 for one in products)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    autotune.reorder_weights(base, autotune.REORDER_MEMORY_SHARE * size)
    assert not any(one.reordered for one in products)  # float32 is faster without
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    autotune.reorder_weights(base, autotune.REORDER_MEMORY_SHARE * size - 1)
    assert not any(one.reordered for one in products)
    autotune.reorder_weights(base, autotune.REORDER_MEMORY_SHARE * size)
    assert all(one.reordered for one in products)


def test_where_the_processor_cannot_order_bfloat16_it_is_left_plain_and_float32_is_ordered(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    weight = torch.randn(48, 80)
    assert not FrozenLinear(weight.bfloat16()).reorder().reordered
    assert FrozenLinear(weight).reorder().reordered == torch.backends.mkldnn.is_available()
