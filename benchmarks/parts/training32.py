"""The GRPO batch in float32 on both sides."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.contest import Line, Setting
from benchmarks.parts import training


def measure(setting: Setting) -> list[Line]:
    """One line."""
    return training.measure(replace(setting, dtype="float32"))
