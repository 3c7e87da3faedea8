"""The whole engine on the stand-in device gives the CPU's numbers, for each architecture.

`make test` runs one type of each family, the slow tests run all that are served.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import architectures, vision
from tests.architectures import save_tiny
from tests.engine.device import programs

TOLERANCE = 2e-4
"""The gradient of the tiny Qwen3.5 differs by 1.3e-4 with images, all else by less than 5e-5."""
OFTEN = (
    *("llama", "gemma2", "gemma4_text", "minicpm3"),
    *("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_text"),
    *("gpt2", "kimi_linear"),  # on the general path
)
TWO_LAYERS = ("llama", "gemma2", "minicpm3", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_text", "kimi_linear")
"""Kinds that have a layer of each of their kinds in the first two."""
RARELY = [kind for kind in architectures.TYPES if kind not in (*architectures.REFUSED, *OFTEN)]


@pytest.mark.parametrize("kind", [*OFTEN, *(pytest.param(kind, marks=pytest.mark.slow) for kind in RARELY)])
def test_architecture_on_device_equals_cpu(stand_in: Any, kind: str, tmp_path: Path):
    layers = {"num_hidden_layers": 2} if kind in TWO_LAYERS else {}
    assert_equal(stand_in(programs.differences, save_tiny(kind, tmp_path, **layers), programs.train_and_sample))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "qwen3_vl" else pytest.mark.slow) for kind in vision.TYPES]
)
def test_images_on_device_equal_cpu(stand_in: Any, kind: str, tmp_path: Path):
    folder = vision.save_vision_model(tmp_path, kind)
    assert_equal(stand_in(programs.differences, folder, programs.train_and_sample_images))


def assert_equal(differences: dict[str, float]) -> None:
    assert differences["tokens"] == 0
    assert max(differences.values()) < TOLERANCE, differences
