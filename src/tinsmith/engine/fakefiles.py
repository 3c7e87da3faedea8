"""The fake engine's adapter folders: PEFT's file names, safetensors through numpy, written whole or not at all."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tinsmith.engine.base import LoraSpec
from tinsmith.engine.folders import size_of, written_whole
from tinsmith.errors import EngineError

_PREFIX = "base_model.model.lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """An adapter on the output matrix: logits += scale * B A h."""

    lora: LoraSpec
    a: np.ndarray
    """float32 [rank, hidden]."""
    b: np.ndarray
    """float32 [vocabulary, rank]."""

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.lora.alpha / self.lora.rank


def write_folder(to: Path, weights: Weights, moments: list[np.ndarray] | None) -> int:
    """The folder appears under its name only when complete; returns its bytes."""
    config = {
        "peft_type": "LORA",
        "r": weights.lora.rank,
        "lora_alpha": weights.lora.alpha,
        "spec": asdict(weights.lora),
    }
    tensors = {f"{_PREFIX}.lora_A.weight": weights.a, f"{_PREFIX}.lora_B.weight": weights.b}
    with written_whole(to) as part:
        (part / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, part / "adapter_model.safetensors")
        if moments is not None:
            save_file({str(index): value for index, value in enumerate(moments)}, part / "optimizer.safetensors")
        return size_of(part)


def read_folder(source: Path) -> tuple[Weights, list[np.ndarray] | None]:
    """Weights, and moments if the folder has them. Raises EngineError if it is not such a folder."""
    try:
        config = json.loads((source / "adapter_config.json").read_text())
        tensors = load_file(source / "adapter_model.safetensors")
    except OSError as error:
        raise EngineError(f"The adapter folder {source} cannot be read: {error}") from error
    weights = Weights(
        lora=LoraSpec(**config["spec"]),
        a=tensors[f"{_PREFIX}.lora_A.weight"],
        b=tensors[f"{_PREFIX}.lora_B.weight"],
    )
    held = source / "optimizer.safetensors"
    if not held.is_file():
        return weights, None
    moments = load_file(held)
    return weights, [moments[str(index)] for index in range(len(moments))]
