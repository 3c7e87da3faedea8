"""Our modules stand in for the base's where they compute the same, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import KINDS
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.lora import layers, linear
from tinsmith.engine.model import loading


def loaded(folder: Path, dtype: str = "float32") -> loading.BaseModel:
    base = loading.load(EngineConfig(source=str(folder), dtype=dtype, device="cpu"))  # type: ignore[arg-type]
    linear.adapt(base)
    return base


def kinds_of(base: loading.BaseModel) -> set[str]:
    return {
        type(module).__module__
        for module in base.body.modules()
        if type(module).__name__.endswith(("Norm", "MLP", "Mlp"))
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_served_kind_gets_our_modules(kind: str, tiny: Callable[[str], Path]) -> None:
    base = loaded(tiny(kind))
    with torch.no_grad():
        before = loading.probe(base)
        ours = layers.replace_layers(base)
        torch.testing.assert_close(loading.probe(ours), before, rtol=1e-4, atol=1e-4)
    assert ours.float32_residual
    assert kinds_of(ours) == {"tinsmith.engine.lora.layers"}


def test_in_bfloat16_our_modules_are_nearer_to_float32(tiny_llama: Path) -> None:
    with torch.no_grad():
        exact, base = loading.probe(loaded(tiny_llama)), loaded(tiny_llama, "bfloat16")
        theirs = (loading.probe(base) - exact).abs().mean()
        ours = (loading.probe(layers.replace_layers(base)) - exact).abs().mean()
    assert ours < theirs


@pytest.mark.parametrize("part", ["input_layernorm", "mlp", "self_attn"])
def test_a_model_that_computes_otherwise_keeps_its_modules(part: str, tiny_llama: Path) -> None:
    base = loaded(tiny_llama)
    module: Any = base.body.layers[1].get_submodule(part)  # type: ignore[index,union-attr]
    if part == "self_attn":
        module.forward = _halved(module.forward)
    else:
        module.register_forward_hook(lambda _, __, output: output * 1.1)
    with torch.no_grad():
        before = loading.probe(base)
        after = layers.replace_layers(base)
        torch.testing.assert_close(loading.probe(after), before, rtol=0, atol=0)
    assert not after.float32_residual
    assert "tinsmith.engine.lora.layers" not in kinds_of(after)


def _halved(forward: Callable[..., Any]) -> Callable[..., Any]:
    def half(*args: Any, **settings: Any) -> Any:
        output, weights = forward(*args, **settings)
        return output / 2, weights

    return half
