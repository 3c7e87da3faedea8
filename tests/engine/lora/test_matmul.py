"""Reordered matrices compute what plain ones do, and are not used where memory is short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tinsmith.engine import autotune
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.lora import linear, matmul
from tinsmith.engine.lora.adapter import AdapterWeights, LoraPair
from tinsmith.engine.lora.matmul import FLOAT32_ROWS, FrozenLinear
from tinsmith.engine.model import loading


@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_forward_and_backward_match_float64(dtype: torch.dtype, tolerance: float, biased: bool, rows: int):
    draw = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(48, 80, generator=draw).to(dtype), torch.randn(48, generator=draw).to(dtype)
    inputs, grads, onto = (torch.randn(rows, width, generator=draw).to(dtype) for width in (80, 48, 80))
    wide = weight.double()
    forth = inputs.double() @ wide.T + (bias.double() if biased else 0)
    back = grads.double() @ wide
    plain = FrozenLinear(weight, bias if biased else None)
    for frozen in (plain, FrozenLinear(weight, bias if biased else None).reorder()):
        for actual, exact in (
            (frozen(inputs), forth),
            (frozen.backward(grads), back),
            (frozen.backward(grads, onto=onto.clone()), onto.double() + back),
        ):
            assert (actual.double() - exact).abs().max() <= tolerance * exact.abs().max()
            assert actual.dtype == dtype


def test_weights_are_reordered_if_memory_allows(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch):
    base = loading.load(EngineConfig(source=str(tiny_llama), dtype="float32", device="cpu"))
    linear.adapt(base)
    matrices = [module.frozen for module in base.model.modules() if isinstance(module, linear.LoraLinear)]
    size = sum(matrix.shape.numel() * 4 for matrix in matrices)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    autotune.reorder_weights(base, autotune.REORDER_MEMORY_SHARE * size)
    assert not any(matrix.reordered for matrix in matrices)  # float32 is faster without
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    autotune.reorder_weights(base, autotune.REORDER_MEMORY_SHARE * size - 1)
    assert not any(matrix.reordered for matrix in matrices)
    autotune.reorder_weights(base, autotune.REORDER_MEMORY_SHARE * size)
    assert all(matrix.reordered for matrix in matrices)


def test_bfloat16_is_not_reordered_without_cpu_support(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    weight = torch.randn(48, 80)
    assert not FrozenLinear(weight.bfloat16()).reorder().reordered
    assert FrozenLinear(weight).reorder().reordered == torch.backends.mkldnn.is_available()


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="bfloat16 is not reordered here")
@pytest.mark.parametrize("count", [1, linear.MIN_BATCH_ADAPTERS])
def test_float32_products_round_once(count: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(matmul, "multiplies_float32_faster", lambda: True)
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).bfloat16()

    weight, rows, each = drawn(48, 80), FLOAT32_ROWS, FLOAT32_ROWS // count
    pairs = [LoraPair(drawn(4, 80), drawn(48, 4)) for _ in range(count)]
    gradients = [LoraPair(torch.zeros(4, 80), torch.zeros(48, 4)) for _ in range(count)]
    placed = [
        (AdapterWeights(0.5, {"p": pair}, {"p": gradient}), number * each, (number + 1) * each)
        for number, (pair, gradient) in enumerate(zip(pairs, gradients, strict=True))
    ]
    frozen = FrozenLinear(weight).reorder()
    assert [frozen.takes_float32(height) for height in (rows, rows - 1)] == [True, False]
    inputs, grads = drawn(rows, 80).requires_grad_(), drawn(rows, 48)
    (output,) = linear.project(inputs, [linear.Projection("p", frozen)], linear.group_adapters(placed))
    output.backward(grads)
    assert (output.dtype, inputs.grad is not None and inputs.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    for number, (pair, gradient) in enumerate(zip(pairs, gradients, strict=True)):
        own = slice(number * each, (number + 1) * each)
        x, g, a, b = (tensor.detach().double() for tensor in (inputs[own], grads[own], pair.a, pair.b))
        whole = weight.double() + 0.5 * b @ a
        assert inputs.grad is not None
        for actual, exact in ((output[own], x @ whole.T), (inputs.grad[own], g @ whole)):
            torch.testing.assert_close(actual.detach().double(), exact, rtol=2**-8, atol=1e-4)  # one rounding
        torch.testing.assert_close(gradient.a.double(), 0.5 * (g @ b).T @ x, rtol=1e-4, atol=1e-3)
        exact = 0.5 * g.T @ (x @ a.T)
        assert (gradient.b.double() - exact).norm() <= 2**-8 * exact.norm()  # A x is stored in bfloat16
