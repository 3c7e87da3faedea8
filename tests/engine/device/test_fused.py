"""Fused kernels on a GPU: the CPU's numbers, in few launches that read and write little."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.architectures import save_tiny
from tests.engine.device import fused
from tests.engine.device.test_equality import assert_equal

LAUNCHES, BYTES_RATIO = 80, 0.35
"""Of a layer, forward and backward, at most; the bytes in relation to those of PyTorch's operators."""
KERNELS = ("add_norm", "rotate", "silu_mul")
SHAPE = {"hidden_size": 160, "intermediate_size": 608, "num_attention_heads": 8, "head_dim": 32}
"""As Qwen3-4B, sixteen times as narrow."""


@pytest.mark.parametrize(
    ("kind", "recompute", "kernels"),
    [("llama", "auto", KERNELS), ("qwen3", "always", KERNELS), ("qwen3_5_moe_text", "auto", (*KERNELS, "gated_norm"))],
)
def test_fused_kernels_on_device_equal_cpu(
    stand_in: Any, kind: str, recompute: str, kernels: Sequence[str], tmp_path: Path
):
    differences, launched = stand_in(
        fused.differences, save_tiny(kind, tmp_path, num_hidden_layers=2), recompute=recompute
    )
    assert_equal(differences)
    assert launched == {f"fused::{name}{direction}" for name in kernels for direction in ("", "_backward")}


def test_layer_has_few_launches_and_bytes(stand_in: Any, tmp_path: Path):
    source = save_tiny("qwen3", tmp_path, num_hidden_layers=2, **SHAPE)
    launches, bytes_ = stand_in(fused.layer_costs, source, fused=True)
    _, bytes_before = stand_in(fused.layer_costs, source, fused=False)
    assert launches <= LAUNCHES
    assert bytes_ <= BYTES_RATIO * bytes_before
