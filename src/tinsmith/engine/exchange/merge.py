"""Merged models: W + (alpha / rank) B A in float32, stored in the base's data type, as a folder for transformers.

The base's files are read tensor by tensor and written in shards, so memory holds one shard and the adapter.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tinsmith.atomic import atomic_folder
from tinsmith.engine.exchange.adapters import read_config, read_tensors
from tinsmith.engine.model_parts import HEAD
from tinsmith.errors import ConfigError, Unsupported

ROW_SLICES = ("in_proj_q", "in_proj_k", "in_proj_v")
"""Slices of the rows of in_proj_qkv, in their order."""
SHARD_BYTES = 4 << 30
INDEX = "model.safetensors.index.json"
_EXPERT_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Names of an expert's matrices in Tinker's form of an adapter, and in a checkpoint of the base."""
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True, slots=True)
class _Delta:
    """A [r, in] and B [out, r] that change the rows of a weight from `row` on."""

    a: Tensor
    b: Tensor
    row: int = 0


def merge(adapter: Path, base: Path, to: Path, *, shard_bytes: int = SHARD_BYTES) -> int:
    """Write the base model with the adapter merged into it, and the base's tokenizer. Returns the number of weights
    that the adapter changed.

    Raises ConfigError if the base's files are missing, Unsupported if they are quantised or do not fit the adapter.
    """
    config = _base_config(base)
    settings = read_config(adapter)
    scale = float(settings["lora_alpha"]) / int(settings["r"])
    deltas = _deltas(read_tensors(adapter))
    files = {name: file for file in _weight_files(base) for name in _names(file)}
    targets = {_stored_name(name, files, base): changes for name, changes in deltas.items()}
    head = targets.get(f"{HEAD}.weight")
    if head is not None:  # tied or not, the merged model has a head of its own
        for section in (config, config.get("text_config") or {}):
            section["tie_word_embeddings"] = False
    with atomic_folder(to) as scratch:
        shards = _Shards(scratch, shard_bytes)
        for name, tensor in _tensors(files):
            shards.add(name, _changed(name, tensor, targets.get(name, ()), scale))
            if head is not None and f"{HEAD}.weight" not in files and name.endswith("embed_tokens.weight"):
                shards.add(f"{HEAD}.weight", _changed(f"{HEAD}.weight", tensor, head, scale))
        shards.close()
        for file in base.iterdir():
            if file.is_file() and file.suffix not in _WEIGHT_FILES and not file.name.endswith(".index.json"):
                shutil.copyfile(file, scratch / file.name)
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return len(targets)


def _base_config(base: Path) -> dict[str, Any]:
    try:
        config = json.loads((base / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{base} holds no model: {error}.", "Give the base model's folder or hub id: --base."
        ) from error
    if config.get("quantization_config"):
        raise Unsupported(
            f"The base model in {base} is quantised.",
            "Merge into the original weights: --base FOLDER. Or export the adapter alone: --format peft.",
        )
    return config


def _weight_files(base: Path) -> list[Path]:
    if (base / INDEX).is_file():
        return [base / name for name in sorted(set(json.loads((base / INDEX).read_text())["weight_map"].values()))]
    if (base / "model.safetensors").is_file():
        return [base / "model.safetensors"]
    raise ConfigError(
        f"{base} has no model.safetensors.", "Save the base model with safetensors, and give its folder: --base."
    )


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def _tensors(files: dict[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the base, in the order of its files; each is read when it is its turn."""
    for file in dict.fromkeys(files.values()):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)


def _deltas(tensors: dict[str, Tensor]) -> dict[str, list[_Delta]]:
    """Changes by the name of the weight in a checkpoint of the base."""
    deltas: dict[str, list[_Delta]] = {}
    for key in sorted(name for name in tensors if name.endswith(".lora_A.weight")):
        module = key.removesuffix(".lora_A.weight")
        a, b = tensors[key], tensors[f"{module}.lora_B.weight"]
        parent, _, leaf = module.rpartition(".")
        if a.ndim == 3:
            for expert in range(max(len(a), len(b))):
                name = f"{parent}.{expert}.{_EXPERT_MATRICES[leaf]}.weight"
                deltas[name] = [_Delta(a[expert % len(a)], b[expert % len(b)])]
        elif leaf in ROW_SLICES:
            earlier = ROW_SLICES[: ROW_SLICES.index(leaf)]
            row = sum(len(tensors[f"{parent}.{name}.lora_B.weight"]) for name in earlier)
            deltas.setdefault(f"{parent}.in_proj_qkv.weight", []).append(_Delta(a, b, row))
        else:
            deltas[f"{module}.weight"] = [_Delta(a, b)]
    return deltas


def _stored_name(name: str, files: dict[str, Path], base: Path) -> str:
    """The name of a weight in the base's files, where a wrapper of other modalities may add a prefix."""
    if name in files:
        return name
    matches = [stored for stored in files if stored.endswith(f".{name.removeprefix('model.')}")]
    if len(matches) == 1:
        return matches[0]
    if name == f"{HEAD}.weight" and any(stored.endswith("embed_tokens.weight") for stored in files):
        return name
    raise Unsupported(
        f"The adapter changes {name}, which {base} does not hold.",
        "Give the base model that it was trained on: --base. Its weights must be stored as separate matrices.",
    )


def _changed(name: str, weight: Tensor, deltas: list[_Delta] | tuple[()], scale: float) -> Tensor:
    if not deltas:
        return weight
    if not weight.is_floating_point():
        raise Unsupported(
            f"{name} of the base is stored as {weight.dtype}.", "Merge into the original weights: --base."
        )
    merged = weight.to(torch.float32, copy=True)  # a tied embedding stays as it is
    for delta in deltas:
        rows = merged[delta.row : delta.row + len(delta.b)]
        if rows.shape != (len(delta.b), delta.a.shape[1]):
            raise Unsupported(
                f"The adapter's change of {name} is {(len(delta.b), delta.a.shape[1])}; the base's is"
                f" {tuple(weight.shape)}.",
                "Give the base model that it was trained on: --base.",
            )
        rows += scale * (delta.b.float() @ delta.a.float())
    return merged.to(weight.dtype)


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
