"""Own modules replace those of the base model where they compute the same; their formulas match autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import KINDS
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.lora import layers, linear
from tinsmith.engine.lora.elementwise.operators import apply_rotary, rms_norm, rotary_tables, silu_mul
from tinsmith.engine.model import loading, self_check
from tinsmith.engine.model.base_model import BaseModel


def loaded(folder: Path, dtype: str = "float32") -> BaseModel:
    base = loading.load(EngineConfig(source=str(folder), dtype=dtype, device="cpu"))  # type: ignore[arg-type]
    linear.adapt(base)
    return base


def kinds_of(base: BaseModel) -> set[str]:
    return {
        type(module).__module__
        for module in base.body.modules()
        if type(module).__name__.endswith(("Norm", "MLP", "Mlp"))
    }


@pytest.mark.parametrize("kind", KINDS)
def test_modules_of_supported_models_are_replaced(kind: str, tiny: Callable[[str], Path]) -> None:
    base = loaded(tiny(kind))
    with torch.no_grad():
        before = self_check.probe(base)
        replaced = layers.replace_layers(base)
        torch.testing.assert_close(self_check.probe(replaced), before, rtol=1e-4, atol=1e-4)
    assert replaced.float32_residual
    assert kinds_of(replaced) == {"tinsmith.engine.lora.layers"}


def test_replaced_modules_are_closer_to_float32_in_bfloat16(tiny_llama: Path) -> None:
    with torch.no_grad():
        exact, base = self_check.probe(loaded(tiny_llama)), loaded(tiny_llama, "bfloat16")
        original = (self_check.probe(base) - exact).abs().mean()
        replaced = (self_check.probe(layers.replace_layers(base)) - exact).abs().mean()
    assert replaced < original


@pytest.mark.parametrize("part", ["input_layernorm", "mlp", "self_attn"])
def test_model_with_other_outputs_keeps_its_modules(part: str, tiny_llama: Path) -> None:
    base = loaded(tiny_llama)
    module: Any = base.body.layers[1].get_submodule(part)  # type: ignore[index,union-attr]
    if part == "self_attn":
        module.forward = _halved(module.forward)
    else:
        module.register_forward_hook(lambda _, __, output: output * 1.1)
    with torch.no_grad():
        before = self_check.probe(base)
        after = layers.replace_layers(base)
        torch.testing.assert_close(self_check.probe(after), before, rtol=0, atol=0)
    assert not after.float32_residual
    assert "tinsmith.engine.lora.layers" not in kinds_of(after)


def _halved(forward: Callable[..., Any]) -> Callable[..., Any]:
    def half(*args: Any, **settings: Any) -> Any:
        output, weights = forward(*args, **settings)
        return output / 2, weights

    return half


EPS = 1e-5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ANGLES = drawn(1, 5, 4, seed=7).repeat(1, 1, 2)
WEIGHT = drawn(16, seed=8)


def rotated(inputs: Tensor) -> Tensor:
    left, right = inputs.chunk(2, dim=-1)
    cos, sin = ANGLES.cos()[:, :, None], ANGLES.sin()[:, :, None]
    return inputs * cos + torch.cat([-right, left], -1) * sin


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]] = {
    "norm": (
        lambda x: rms_norm(x, WEIGHT.to(torch.get_default_dtype()), EPS),
        lambda x: WEIGHT * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt(),
        [drawn(1, 5, 16)],
    ),
    "norm from its output": (
        lambda x: rms_norm(x, WEIGHT.to(torch.get_default_dtype()), EPS, (1 / WEIGHT).float()),
        lambda x: WEIGHT * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt(),
        [drawn(1, 5, 16)],
    ),
    "rotation": (
        lambda x: apply_rotary(x, *rotary_tables(ANGLES.cos(), ANGLES.sin(), x.dtype)),
        rotated,
        [drawn(1, 5, 3, 8)],
    ),
    "gate": (silu_mul, lambda gate, up: torch.sigmoid(gate) * gate * up, [drawn(1, 5, 12), drawn(1, 5, 12, seed=1)]),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_match_formula(name: str) -> None:
    engine_function, plain, inputs = CASES[name]
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    single = [tensor.float().requires_grad_() for tensor in inputs]
    wanted, actual = plain(*leaves), engine_function(*single)
    output_grad = drawn(*wanted.shape, seed=3)
    wanted.backward(output_grad)
    actual.backward(output_grad.float())
    torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(engine_function(*single), actual, rtol=0, atol=0)
    for left, leaf in zip(single, leaves, strict=True):
        assert left.grad is not None
        torch.testing.assert_close(left.grad.double(), leaf.grad, rtol=1e-4, atol=1e-5)


def test_norm_of_float32_has_dtype_of_its_weight() -> None:
    inputs = drawn(1, 3, 16).float().requires_grad_()
    output = rms_norm(inputs, WEIGHT.bfloat16(), EPS)
    output.backward(torch.ones_like(output))
    assert output.dtype == torch.bfloat16
    assert inputs.grad is not None
    assert inputs.grad.dtype == torch.float32


def test_recomputed_tensor_is_not_saved() -> None:
    inputs, weight = torch.randn(3, 4, requires_grad=True), torch.randn(12, requires_grad=True)
    product, calls = inputs.exp(), list[int]()
    (wanted,) = torch.autograd.grad((inputs.exp().view(12) * weight).sum(), [weight])

    def compute() -> Tensor:
        calls.append(1)
        return inputs.exp()

    with layers.recomputed_in_backward(product, compute):
        output = product.view(12) * weight
    assert not calls
    assert torch.equal(torch.autograd.grad(output.sum(), [weight])[0], wanted)
    assert calls == [1]
    with torch.no_grad(), layers.recomputed_in_backward(product, compute):
        assert not (product * 2).requires_grad
    assert calls == [1]
