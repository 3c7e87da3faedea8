"""Merged models: W + (alpha / rank) B A in float32, stored in the base's data type, as a folder for transformers.

The base's files are read tensor by tensor and written in shards, so memory holds one shard and the adapter.
`stored_changes` says what changes in them; `stored_weights` reads them, quantised ones as a whole model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from tinsmith.atomic import atomic_folder
from tinsmith.engine.exchange.forms import model_facts
from tinsmith.engine.exchange.reading import read_pairs
from tinsmith.engine.exchange.stored_changes import StoredChanges
from tinsmith.engine.exchange.stored_weights import INDEX, read_weights
from tinsmith.engine.images.tower import without_weights
from tinsmith.engine.model.sources import load_errors
from tinsmith.errors import ConfigError, Unsupported

SHARD_BYTES = 4 << 30
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def merge(adapter: Path, base: Path, to: Path, *, shard_bytes: int = SHARD_BYTES) -> int:
    """Write the base model with the adapter merged into it, and the base's tokenizer. Returns the number of weights
    that the adapter changed.

    Raises ConfigError if the base's files are missing, Unsupported if they are quantised in a form that is not read, or
    do not fit the adapter.
    """
    settings = _settings(base)
    with load_errors(str(base)):
        config = AutoConfig.from_pretrained(base)
    weights = read_weights(base, config)
    changes = _changes(adapter, config, weights.names)
    for section in (settings, settings.get("text_config") or {}):
        section.pop("quantization_config", None)
        if changes.head:  # tied or not, the merged model has a head of its own
            section["tie_word_embeddings"] = False
    with atomic_folder(to) as scratch:
        shards = _Shards(scratch, shard_bytes)
        for name, tensor in weights.tensors():
            shards.add(name, _changed(name, tensor, changes) if name in changes.names else tensor)
            if name == changes.embeddings and changes.head and changes.head not in weights.names:
                shards.add(changes.head, _changed(changes.head, tensor, changes))
        shards.close()
        for file in base.iterdir():
            if file.is_file() and file.suffix not in _WEIGHT_FILES and not file.name.endswith(".index.json"):
                shutil.copyfile(file, scratch / file.name)
        (scratch / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return len(changes.names)


def _changes(adapter: Path, config: PreTrainedConfig, stored: Collection[str]) -> StoredChanges:
    """What an adapter in any form changes of the stored weights."""
    model = without_weights(config)
    _, pairs = read_pairs(adapter, model_facts(model, str(adapter)))
    return StoredChanges(model, pairs, stored)


def _changed(name: str, weight: Tensor, changes: StoredChanges) -> Tensor:
    change = changes.change(name)
    if weight.shape != change.shape:
        raise Unsupported(
            f"The adapter's change of {name} is {tuple(change.shape)}; the base's is {tuple(weight.shape)}.",
            "Give the base model that it was trained on: --base.",
        )
    if not weight.is_floating_point():
        raise Unsupported(
            f"{name} of the base is stored as {weight.dtype}.", "Merge into the original weights: --base."
        )
    return change.add_(weight).to(weight.dtype)


def _settings(base: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads((base / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{base} holds no model: {error}.", "Give the base model's folder or hub id: --base."
        ) from error
    return settings


@dataclass(slots=True)
class _Shards:
    """Writes tensors into files of a limited size, and their index."""

    folder: Path
    limit: int
    held: dict[str, Tensor] = field(default_factory=dict)
    files: list[list[str]] = field(default_factory=list)
    bytes: int = 0
    total: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self.held and self.bytes + tensor.nbytes > self.limit:
            self._flush()
        self.held[name] = tensor.contiguous()
        self.bytes += tensor.nbytes
        self.total += tensor.nbytes

    def close(self) -> None:
        self._flush()
        count = len(self.files)
        names = {part: f"model-{part:05d}-of-{count:05d}.safetensors" for part in range(1, count + 1)}
        names = {1: "model.safetensors"} if count == 1 else names
        for part, name in names.items():
            (self.folder / f"part-{part}").rename(self.folder / name)
        if count > 1:
            places = {tensor: names[part] for part, tensors in enumerate(self.files, 1) for tensor in tensors}
            index = {"metadata": {"total_size": self.total}, "weight_map": places}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        self.files.append(list(self.held))
        save_file(self.held, self.folder / f"part-{len(self.files)}", metadata={"format": "pt"})
        self.held, self.bytes = {}, 0
