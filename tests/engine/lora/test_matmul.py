"""Reordered matrices compute what plain ones do, and are not used where memory is short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.cpu.processor import each_dtype, needs_pairs, needs_panels
from tinsmith.engine import autotune
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.cpu.panels import AS_FACTORS
from tinsmith.engine.lora import compiled_adapters, compiled_projections, linear, matmul
from tinsmith.engine.lora.matmul import FrozenLinear
from tinsmith.engine.model import loading
from tinsmith.engine.model.precision import dtype_name


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


@each_dtype
@pytest.mark.parametrize("biased", [False, True])
def test_panels_match_float64(dtype: torch.dtype, biased: bool) -> None:
    """Of a matrix whose rows are not side by side, as one of Conv1D."""
    draw, tolerance = torch.Generator().manual_seed(0), 1e-2 if dtype == torch.bfloat16 else 1e-6
    weight, bias = torch.randn(96, 64, generator=draw).to(dtype).T, torch.randn(64, generator=draw).to(dtype)
    frozen = FrozenLinear(weight, bias if biased else None)
    frozen.lay_out()
    inputs, grads, onto = (torch.randn(70, width, generator=draw).to(dtype) for width in (96, 64, 96))
    back = grads.double() @ weight.double()
    for actual, exact in (
        (frozen(inputs), inputs.double() @ weight.double().T + (bias.double() if biased else 0)),
        (frozen.backward(grads), back),
        (frozen.backward(grads, onto=onto.clone()), onto.double() + back),
    ):
        assert (actual.double() - exact).abs().max() <= tolerance * exact.abs().max()


@needs_panels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float32_matrix_is_kept_as_its_weights_allow(dtype: torch.dtype) -> None:
    """In two bytes where these represent it, and with the very results of the whole matrix."""
    weight, draw = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    weight[0, 0] = 2.0**-20  # of float16 a number below the normal ones
    weight = weight.to(dtype).float()
    frozen, whole = FrozenLinear(weight.clone()), FrozenLinear(weight + 0)
    assert frozen.is_half == (dtype != torch.float32)
    frozen.lay_out()
    assert frozen.panels is not None
    assert {frozen.panels.forward.dtype, frozen.panels.backward.dtype} == {dtype}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_projections, "_storages", lambda dtype: [(dtype, AS_FACTORS)])
        whole.lay_out()
    assert whole.panels.forward.dtype == torch.float32
    for rows in (1, 3, 30):
        inputs, grads = (torch.randn(rows, width, generator=draw) for width in (64, 96))
        assert torch.equal(frozen(inputs), whole(inputs))
        assert torch.equal(frozen.backward(grads), whole.backward(grads))


@needs_panels
def test_rounding_hardly_grows_with_width() -> None:
    """Terms added up one after another would be wrong by 1.1e-6 here, PyTorch's products are by 2.6e-7."""
    draw = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(64, 4096, generator=draw) / 64, torch.randn(30, 4096, generator=draw)
    frozen = FrozenLinear(weight)
    frozen.lay_out()
    differences = frozen(inputs).double() - inputs.double() @ weight.double().T
    assert differences.square().mean().sqrt() <= 4e-7


@each_dtype
def test_matrices_are_laid_out_in_panels(dtype: torch.dtype, tiny_llama: Path) -> None:
    base = loading.load(EngineConfig(source=str(tiny_llama), dtype=dtype_name(dtype), device="cpu"))
    linear.adapt(base)
    autotune.reorder_weights(base, 1 << 40)
    matrices = [module.frozen for module in base.model.modules() if isinstance(module, linear.LoraLinear)]
    fitting = [matrix for matrix in matrices if not any(size % 32 for size in matrix.shape)]
    assert fitting
    assert all(isinstance(matrix, FrozenLinear) and matrix.panels is not None for matrix in fitting)


@each_dtype
@pytest.mark.parametrize("half", [False, True])
def test_matrices_are_laid_out_as_memory_allows(dtype: torch.dtype, half: bool, tiny_llama: Path) -> None:
    """Once if they fit, and a second time if that is a small part of the memory. Float32 ones of two bytes a weight
    leave half of theirs free."""

    def layouts(free: float) -> set[int]:
        base = loading.load(EngineConfig(source=str(tiny_llama), dtype=dtype_name(dtype), device="cpu"))
        linear.adapt(base)
        matrices = [module.frozen for module in base.model.modules() if isinstance(module, linear.LoraLinear)]
        if half:
            for matrix in matrices:
                matrix.tensors()[0].copy_(matrix.tensors()[0].bfloat16())
        fitting = [matrix for matrix in matrices if not any(size % 32 for size in matrix.shape)]
        size = sum(matrix.shape.numel() * (2 if half else dtype.itemsize) for matrix in fitting)
        autotune.reorder_weights(base, round(free * size))
        panels = [matrix.panels for matrix in fitting]
        return {0 if own is None else 1 if own.backward is None else 2 for own in panels}

    freed = 2 if half and dtype == torch.float32 else 0
    assert layouts(autotune.REORDER_MEMORY_SHARE - freed) == {2}
    assert layouts(autotune.REORDER_MEMORY_SHARE - freed - 0.001) == {1}
    assert layouts(4 / 3 - freed + 0.001) == {1}
    assert layouts(4 / 3 - freed - 0.001) == {0}


@pytest.mark.parametrize(
    ("dtype", "represented"),
    [
        pytest.param(torch.bfloat16, torch.bfloat16, marks=needs_pairs),
        pytest.param(torch.float32, torch.bfloat16, marks=needs_panels),
        pytest.param(torch.float32, torch.float16, marks=needs_panels),
        pytest.param(torch.float32, torch.float32, marks=needs_panels),
    ],
)
def test_one_layout_computes_what_two_do(dtype: torch.dtype, represented: torch.dtype) -> None:
    """The second, made of the first once or at each gradient of inputs, is that of the transposed matrix."""
    weights = torch.randn(3, 96, 160, generator=torch.Generator().manual_seed(0)).to(represented).to(dtype)
    expected = compiled_projections.Panels.of_experts(weights.mT, backward=False).forward.view(torch.int16)
    two_layouts = compiled_projections.Panels.of_experts(weights)
    panels = compiled_projections.Panels.of_experts(weights, backward=False)
    assert panels.backward is None
    assert panels.forward.dtype == represented
    assert torch.equal(panels.transposed().view(torch.int16), expected)
    assert torch.equal(two_layouts.backward.view(torch.int16), expected)
    assert two_layouts.transposed() is two_layouts.backward


def test_weights_are_reordered_if_memory_allows(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch):
    """Where no compiled functions multiply, and of bfloat16 alone."""
    monkeypatch.setattr(compiled_adapters, "panel_kind", lambda *_: None)
    for dtype in (torch.float32, torch.bfloat16):
        base = loading.load(EngineConfig(source=str(tiny_llama), dtype=dtype_name(dtype), device="cpu"))
        linear.adapt(base)
        matrices = [module.frozen for module in base.model.modules() if isinstance(module, linear.LoraLinear)]
        size = sum(matrix.shape.numel() * dtype.itemsize for matrix in matrices)
        autotune.reorder_weights(base, autotune.REORDER_MEMORY_SHARE * size - 1)
        assert not any(matrix.reordered for matrix in matrices)
        autotune.reorder_weights(base, autotune.REORDER_MEMORY_SHARE * size)
        is_reordered = dtype == torch.bfloat16 and matmul._can_reorder(dtype)
        assert {matrix.reordered for matrix in matrices} == {is_reordered}


def test_bfloat16_is_not_reordered_without_cpu_support(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    weight = torch.randn(48, 80)
    assert not FrozenLinear(weight.bfloat16()).reorder().reordered
    assert FrozenLinear(weight).reorder().reordered == torch.backends.mkldnn.is_available()
