"""Fused kernels: their gradients, the choice at load, and Triton's in its interpreter and compiled for two GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.lora import fused_cases
from tests.engine.lora.test_layers import loaded
from tests.engine.plain_kernels import PlainKernels
from tests.engine.triton_programs import needs_triton, run_python
from tinsmith.engine.lora import fused_layers, layers
from tinsmith.engine.lora.elementwise import choice
from tinsmith.engine.model import self_check
from tinsmith.engine.model.base_model import BaseModel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_over_kernels_match_operators(dtype: torch.dtype) -> None:
    fused_cases.check(PlainKernels(), torch.empty(0, dtype=dtype))


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
    monkeypatch.setattr(choice, "kernels_on", lambda _: kernels)
    fused_layers.use_kernels(base)


def test_cpu_has_no_kernels(replaced: BaseModel) -> None:
    fused_layers.use_kernels(replaced)
    assert choice.kernels_on(replaced.device) is None
    assert not any(isinstance(module, fused_layers.DecoderLayer) for module in replaced.body.modules())


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
    monkeypatch.setattr(choice, "kernels_on", lambda _: PlainKernels())
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
