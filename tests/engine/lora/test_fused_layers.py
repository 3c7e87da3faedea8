"""Fused kernels: their gradients, the choice at load, Numba's, and Triton's in its interpreter and for two GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.lora import fused_cases
from tests.engine.lora.test_layers import loaded
from tests.engine.plain_kernels import PlainKernels
from tests.engine.triton_programs import needs_triton, run_python
from tinsmith.engine.cpu import arguments
from tinsmith.engine.lora import fused_layers, layers
from tinsmith.engine.lora.elementwise import choice, cpu_kernels
from tinsmith.engine.lora.elementwise.cpu_kernels import CPUKernels
from tinsmith.engine.model import self_check
from tinsmith.engine.model.base_model import BaseModel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_over_kernels_match_operators(dtype: torch.dtype) -> None:
    fused_cases.check(PlainKernels(), torch.empty(0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_loops_equal_operators(dtype: torch.dtype) -> None:
    fused_cases.check(CPUKernels(), torch.empty(0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exponentials_of_gates_are_exact(dtype: torch.dtype) -> None:
    gate = torch.linspace(-80, 80, 32_001).to(dtype)
    expected = torch.nn.functional.silu(gate.double())
    actual = CPUKernels().silu_mul(gate, torch.ones_like(gate)).double()
    torch.testing.assert_close(actual, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_compiled_loops_pass_on_what_is_not_finite(number: float, dtype: torch.dtype) -> None:
    kernels, rows, weight = CPUKernels(), torch.ones(2, 8, dtype=dtype), torch.ones(8, dtype=dtype)
    rows[0, 3] = number
    cos, sin = torch.ones(2, 2, 8, dtype=dtype)
    outputs = [
        kernels.add_norm(rows.float(), rows, weight, 1e-6, dtype)[1],
        kernels.rotate(rows[:, None], cos, sin, None, 0.0)[:, 0],
        kernels.rotate(rows[:, None], cos, sin, weight, 1e-6)[:, 0],
        kernels.silu_mul(torch.ones_like(rows), rows),
        kernels.gated_norm(rows.float(), torch.ones_like(rows), weight, 1e-6),
    ]
    for output in outputs:
        assert not output[0].isfinite().all()
        assert output[1].isfinite().all()


def test_threads_compute_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, draw = CPUKernels(), torch.Generator().manual_seed(0)
    inputs, addition = torch.randn(2, 1001, 65, generator=draw)
    weight = torch.randn(65, generator=draw)
    whole = kernels.add_norm(inputs, addition, weight, 1e-6, torch.float32)
    monkeypatch.setattr(cpu_kernels, "LEAST_NUMBERS", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    divided = kernels.add_norm(inputs, addition, weight, 1e-6, torch.float32)
    torch.testing.assert_close(divided, whole, rtol=0, atol=0)


@needs_triton
def test_interpreted_kernels_equal_operators() -> None:
    run_python("-m", fused_cases.__name__, "interpreted", interpret=True)


@needs_triton
def test_kernels_compile_for_ampere_and_hopper() -> None:
    run_python("-m", fused_cases.__name__, "compiled", interpret=False)


@pytest.fixture
def replaced(tiny: Callable[[str], Path]) -> BaseModel:
    """A model whose layers are replaced."""
    return layers.replace_layers(loaded(tiny("qwen3")))


def use(base: BaseModel, kernels: PlainKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "kernels_on", lambda *_: kernels)
    fused_layers.use_kernels(base)


def test_processor_uses_compiled_loops(replaced: BaseModel) -> None:
    before = self_check.probe(replaced)
    fused_layers.use_kernels(replaced)
    stack: Any = replaced.body.layers
    assert all(isinstance(layer.mlp.kernels, CPUKernels) for layer in stack)
    assert all(isinstance(layer, fused_layers.DecoderLayer) for layer in stack)
    torch.testing.assert_close(self_check.probe(replaced), before, rtol=1e-4, atol=1e-4)


def test_layers_that_were_checked_are_not_computed_again(
    replaced: BaseModel, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused_layers.use_kernels(replaced)
    again = replace(layers.replace_layers(loaded(tiny("qwen3"))), checks=replaced.checks)
    monkeypatch.setattr(fused_layers, "probe", lambda _: pytest.fail("computed again"))
    fused_layers.use_kernels(again)
    stack: Any = again.body.layers
    assert all(isinstance(layer, fused_layers.DecoderLayer) for layer in stack)


def test_processor_without_numba_has_no_kernels(replaced: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda _: None)
    fused_layers.use_kernels(replaced)
    assert not any(isinstance(module, fused_layers.DecoderLayer) for module in replaced.body.modules())


def test_other_dtypes_have_no_kernels() -> None:
    assert choice.kernels_on(torch.device("cpu"), torch.float16) is None


def test_kernels_of_equal_results_are_used(replaced: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    before = self_check.probe(replaced)
    use(replaced, PlainKernels(), monkeypatch)
    stack: Any = replaced.body.layers
    assert all(isinstance(layer, fused_layers.DecoderLayer) for layer in stack)
    torch.testing.assert_close(self_check.probe(replaced), before, rtol=1e-4, atol=1e-4)


def test_kernels_are_used_as_first_layers_allow(
    replaced: BaseModel, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = layers.replace_layers_as(loaded(tiny("qwen3")), replaced)
    monkeypatch.setattr(choice, "kernels_on", lambda *_: PlainKernels())
    fused_layers.use_kernels(base, replaced)
    stack: Any = base.body.layers
    assert all(isinstance(layer, fused_layers.DecoderLayer) for layer in stack)
    torch.testing.assert_close(self_check.probe(base), self_check.probe(replaced), rtol=1e-4, atol=1e-4)
    assert not any(isinstance(module, fused_layers.DecoderLayer) for module in replaced.body.modules())


class WrongGate(PlainKernels):
    def silu_mul_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        gate_grad, up_grad = super().silu_mul_backward(grad, gate, up)
        return gate_grad * 1.02, up_grad


class WrongNorm(PlainKernels):
    def add_norm(self, *inputs: Any) -> Any:
        total, normed, inverse_rms = super().add_norm(*inputs)
        return total, normed * 1.02, inverse_rms


class WrongRotation(PlainKernels):
    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return super().rotate(heads, cos, -sin, weight, eps)


class NotCompiled(PlainKernels):
    def rotate(self, *_: Any) -> Tensor:
        raise RuntimeError("no compiler")


@pytest.mark.parametrize("kernels", [WrongGate, WrongNorm, WrongRotation, NotCompiled])
def test_wrong_kernels_leave_model_as_it_was(
    kernels: type[PlainKernels],
    replaced: BaseModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = self_check.probe(replaced)
    with caplog.at_level(logging.WARNING):
        use(replaced, kernels(), monkeypatch)
    assert "Fused kernels do not work" in caplog.text
    torch.testing.assert_close(self_check.probe(replaced), before, rtol=0, atol=0)
    assert not any(isinstance(module, fused_layers.DecoderLayer) for module in replaced.body.modules())


def test_layer_with_other_residual_keeps_its_form(replaced: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stack: Any = replaced.body.layers
    plain = stack[1].forward
    stack[1].forward = lambda inputs, **settings: inputs + 0.95 * (plain(inputs, **settings) - inputs)
    before = self_check.probe(replaced)
    use(replaced, PlainKernels(), monkeypatch)
    assert [isinstance(layer, fused_layers.DecoderLayer) for layer in stack] == [
        number != 1 for number in range(len(stack))
    ]
    torch.testing.assert_close(self_check.probe(replaced), before, rtol=1e-4, atol=1e-4)
