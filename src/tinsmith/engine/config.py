"""Settings of an engine: one base model on one device."""

from __future__ import annotations

from typing import Literal

from tinsmith.engine_options import EngineOptions

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


class EngineConfig(EngineOptions):
    """One base model on one device."""

    source: str = DEFAULT_MODEL
    """Hub id, folder or GGUF file."""

    kind: Literal["torch", "fake"] = "torch"
    """`torch` runs a model; `fake` computes numbers without one, for tests without torch."""
