"""Reordered matrices compute what plain ones do, and are not used where memory is short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.cpu.processor import needs_pairs
from tinsmith.engine import autotune
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.lora import linear, matmul
from tinsmith.engine.lora.matmul import FrozenLinear, pack_float16
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


@needs_pairs
@pytest.mark.parametrize("biased", [False, True])
def test_panels_match_float64(biased: bool) -> None:
    """Of a matrix whose rows are not side by side, as one of Conv1D."""
    draw = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(96, 64, generator=draw).bfloat16().T, torch.randn(64, generator=draw).bfloat16()
    frozen = FrozenLinear(weight, bias if biased else None).reorder(panels=True)
    assert frozen.panels is not None
    inputs, grads, onto = (torch.randn(70, width, generator=draw).bfloat16() for width in (96, 64, 96))
    back = grads.double() @ weight.double()
    for actual, exact in (
        (frozen(inputs), inputs.double() @ weight.double().T + (bias.double() if biased else 0)),
        (frozen.backward(grads), back),
        (frozen.backward(grads, onto=onto.clone()), onto.double() + back),
    ):
        assert (actual.double() - exact).abs().max() <= 1e-2 * exact.abs().max()
    assert FrozenLinear(weight[:40], None).reorder(panels=True).panels is None  # of another width


@needs_pairs
def test_matrices_of_bfloat16_are_laid_out_in_panels(tiny_llama: Path) -> None:
    base = loading.load(EngineConfig(source=str(tiny_llama), dtype="bfloat16", device="cpu"))
    linear.adapt(base)
    autotune.reorder_weights(base, 1 << 40)
    matrices = [module.frozen for module in base.model.modules() if isinstance(module, linear.LoraLinear)]
    fitting = [matrix for matrix in matrices if not any(size % 32 for size in matrix.shape)]
    assert fitting
    assert all(isinstance(matrix, FrozenLinear) and matrix.panels is not None for matrix in fitting)


def test_weights_are_reordered_if_memory_allows(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch):
    base = loading.load(EngineConfig(source=str(tiny_llama), dtype="float32", device="cpu"))
    linear.adapt(base)
    matrices = [module.frozen for module in base.model.modules() if isinstance(module, linear.LoraLinear)]
    size = sum(matrix.shape.numel() * 4 for matrix in matrices) * 3 // 2  # one more of float32, one of float16
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    autotune.reorder_weights(base, autotune.REORDER_MEMORY_SHARE * size)
    assert not any(matrix.reordered for matrix in matrices)  # float32 is faster without
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    autotune.reorder_weights(base, autotune.REORDER_MEMORY_SHARE * size)
    assert not any(matrix.reordered for matrix in matrices)  # small float32 matrices too
    monkeypatch.setattr(matmul, "LARGE_FLOAT32", 0)
    autotune.reorder_weights(base, autotune.REORDER_MEMORY_SHARE * size - 1)
    assert not any(matrix.reordered for matrix in matrices)
    autotune.reorder_weights(base, autotune.REORDER_MEMORY_SHARE * size)
    assert all(matrix.reordered for matrix in matrices)


FBGEMM = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="PyTorch has no FBGEMM here"
)


@pytest.mark.parametrize("rows", [0, 1, 7, 16, 17])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@FBGEMM
def test_few_rows_of_a_float16_matrix_are_exact(dtype: torch.dtype, rows: int):
    draw = torch.Generator().manual_seed(rows)
    weight = torch.randn(400, 256, generator=draw).to(dtype).float()
    inputs = torch.randn(rows, 256, generator=draw)
    frozen = FrozenLinear(weight, torch.ones(400))
    pack_float16([frozen])
    assert frozen.reorder().has_float16
    exact = inputs.double() @ weight.double().T + 1
    torch.testing.assert_close(frozen(inputs).double(), exact, rtol=0, atol=5e-5)
    # Not contiguous, as a slice of a step's rows is.
    torch.testing.assert_close(frozen(inputs.T.contiguous().T).double(), exact, rtol=0, atol=5e-5)


@pytest.mark.parametrize(("reorder", "limit"), [(False, matmul.PLAIN_FLOAT16_ROWS), (True, matmul.FLOAT16_ROWS)])
@FBGEMM
def test_a_plain_matrix_reads_float16_for_more_rows(reorder: bool, limit: int):
    """The copy differs from the matrix here, so that the outputs show which was read."""
    weight = torch.ones(400, 256)
    frozen = FrozenLinear(weight.clone())
    pack_float16([frozen])
    frozen._float16 = torch.ops.quantized.linear_prepack_fp16(2 * weight, None)
    if reorder:
        frozen.reorder()
    read = [int(frozen(torch.ones(rows, 256))[0, 0]) for rows in (1, limit, limit + 1)]
    assert read == [512, 512, 256]


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(400, 256),
        torch.full((400, 256), 1e5),
        torch.full((400, 256), 1e-7),
        torch.full((400, 256), float("nan")),
        torch.full((400, 256), float("inf")),
        torch.ones(400, 256, dtype=torch.bfloat16),
        torch.ones(40, 256),
    ],
    ids=["float32", "large", "tiny", "nan", "inf", "bfloat16 base", "small matrix"],
)
def test_matrix_that_gains_nothing_is_not_packed(weight: torch.Tensor):
    frozen = FrozenLinear(weight)
    pack_float16([frozen])
    assert not frozen.has_float16


def test_matrix_is_not_packed_without_fbgemm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type(torch.backends.quantized), "supported_engines", ["qnnpack"])
    frozen = FrozenLinear(torch.ones(400, 256))
    pack_float16([frozen])
    assert not frozen.has_float16


def test_bfloat16_is_not_reordered_without_cpu_support(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    weight = torch.randn(48, 80)
    assert not FrozenLinear(weight.bfloat16()).reorder().reordered
    assert FrozenLinear(weight).reorder().reordered == torch.backends.mkldnn.is_available()
