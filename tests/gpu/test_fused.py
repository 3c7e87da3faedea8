"""Fused kernels of norms, rotations and gates on a GPU equal PyTorch's operators, and an engine's layers use them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.lora import fused_cases
from tests.engine.plain_kernels import PlainKernels
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.lora import fused_layers, layers, linear
from tinsmith.engine.lora.elementwise import choice, fused
from tinsmith.engine.model import loading

pytestmark = pytest.mark.gpu


def kernels_of(device: str, dtype: torch.dtype) -> fused.Kernels:
    """The device's kernels; plain ones on a CPU."""
    kernels = choice.kernels_on(torch.device(device), dtype)
    assert kernels is not None or device == "cpu"
    return kernels or PlainKernels()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_kernels_equal_operators(device: str, dtype: torch.dtype):
    fused_cases.check(kernels_of(device, dtype), torch.empty(0, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_use_fused_kernels(
    device: str, tiny: Callable[[str], Path], dtype: str, monkeypatch: pytest.MonkeyPatch
):
    kernels = kernels_of(device, getattr(torch, dtype))
    monkeypatch.setattr(choice, "kernels_on", lambda *_: kernels)
    base = loading.load(EngineConfig(source=str(tiny("qwen3")), dtype=dtype, device=device))  # type: ignore[arg-type]
    linear.adapt(base)
    base = layers.replace_layers(base)
    fused_layers.use_kernels(base)
    assert sum(isinstance(module, fused_layers.DecoderLayer) for module in base.body.modules()) > 0
