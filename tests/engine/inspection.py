"""A model's gradients and weights, by the names of PEFT's adapter file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


def gradients_of(engine: Any, model_id: str) -> dict[str, np.ndarray]:
    """Gradients accumulated since the last step."""
    named = {}
    for module, (a, b) in engine.trainer.gradients(model_id).items():
        named[f"base_model.model.{module}.lora_A.weight"] = a
        named[f"base_model.model.{module}.lora_B.weight"] = b
    return named


def weights_of(engine: Any, model_id: str, wait: Any, folder: Path) -> dict[str, np.ndarray]:
    """The current weights, read from a saved adapter."""
    wait(engine.save(model_id, folder, optimizer=False))
    return load_file(folder / "adapter_model.safetensors")
