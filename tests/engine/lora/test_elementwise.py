"""Norm, rotation and gate against autograd through the formulas in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tinsmith.engine.lora.layers import apply_rotary, rms_norm, rotary_tables, silu_mul

EPS = 1e-5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ANGLES = drawn(1, 5, 4, seed=7).repeat(1, 1, 2)
WEIGHT = drawn(16, seed=8)


def turned(inputs: Tensor) -> Tensor:
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
        turned,
        [drawn(1, 5, 3, 8)],
    ),
    "gate": (silu_mul, lambda gate, up: torch.sigmoid(gate) * gate * up, [drawn(1, 5, 12), drawn(1, 5, 12, seed=1)]),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_formula(name: str) -> None:
    ours, plain, inputs = CASES[name]
    leaves = [one.clone().requires_grad_() for one in inputs]
    single = [one.float().requires_grad_() for one in inputs]
    wanted, found = plain(*leaves), ours(*single)
    slope = drawn(*wanted.shape, seed=3)
    wanted.backward(slope)
    found.backward(slope.float())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(ours(*single), found, rtol=0, atol=0)
    for one, leaf in zip(single, leaves, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), leaf.grad, rtol=1e-4, atol=1e-5)


def test_the_norm_takes_float32_and_gives_what_its_weight_is() -> None:
    inputs = drawn(1, 3, 16).float().requires_grad_()
    output = rms_norm(inputs, WEIGHT.bfloat16(), EPS)
    output.backward(torch.ones_like(output))
    assert output.dtype == torch.bfloat16
    assert inputs.grad is not None
    assert inputs.grad.dtype == torch.float32
