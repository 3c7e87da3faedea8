"""The GRPO batch in float32 on both sides."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.comparison import Line, Setting
from benchmarks.parts import training


def measure(setting: Setting) -> list[Line]:
    """One line; none where all lines are float32."""
    return [] if setting.dtype == "float32" else training.shared_alone(replace(setting, dtype="float32"))
