"""The gated delta rule on a GPU: the CPU's numbers, in launches that do not depend on the length of a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.architectures import save_tiny
from tests.engine.device import rule
from tests.engine.device.test_equality import assert_equal

LAUNCHES = 30
"""Of a layer's rule, forward, again in the backward, and backward, at most."""
KERNELS = {
    *("corrections", "scan", "outputs", "added_gradients", "scan_gradients"),
    *("value_gradients", "product_gradients", "state_gradients", "unit_gradients", "norm_gradients"),
}


def test_rule_by_kernels_on_device_equals_cpu(stand_in: Any, tmp_path: Path):
    differences, launched = stand_in(rule.differences, save_tiny("qwen3_5_text", tmp_path))
    assert_equal(differences)
    assert launched == {f"rule::{name}" for name in KERNELS}


def test_launches_of_rule_are_few_for_any_length(stand_in: Any):
    short, long = (stand_in(rule.launches, length) for length in (100, 2000))
    assert short == long
    assert 2 * long <= LAUNCHES
