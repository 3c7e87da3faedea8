"""The tensors of an adapter folder, checked one by one: every pair whole, of a floating type, finite, not empty.

Reads adapter_model.safetensors, or its shards (adapter_model-00001-of-00002.safetensors and so on). Keys may hold
PEFT's default name of an adapter (lora_A.default.weight), which PEFT adds in memory and takes as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinsmith.engine.exchange.archive import WEIGHTS
from tinsmith.engine.lora.saved_spec import PREFIX
from tinsmith.engine.model.precision import dtype_name
from tinsmith.errors import ConfigError, Unsupported
from tinsmith.plurals import counted

SHARD_INDEX = "adapter_model.safetensors.index.json"
_SHARD = re.compile(r"adapter_model-(\d+)-of-(\d+)\.safetensors")
_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
_DEFAULT_NAME = "default"
_FROZEN = ".base_layer.weight"
"""End of the name of a copy of the head's frozen weight, which PEFT saves beside an adapter of the head."""
_MAY_BE_EMPTY = ".experts.w3"
"""Experts without a gate have an empty pair here in Tinker's form."""
_ONLY_PLAIN = "Only plain LoRA is supported: no modules_to_save, no DoRA, no biases, no trained tokens."


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Matrices of an adapter folder in float32 by name, such as model.layers.0.mlp.up_proj.lora_A.weight.

    Raises ConfigError, with a tensor's name, for files that are missing, damaged or incomplete, and Unsupported for
    tensors that are not LoRA matrices.
    """
    tensors = dict[str, Tensor]()
    others, empty, names = list[str](), list[str](), dict[str, str]()
    for key, stored in _stored(folder):
        match = _MATRIX.fullmatch(key.removeprefix(PREFIX))
        if match is None:
            others += [] if key.endswith(_FROZEN) else [key]
            continue
        if match["adapter"] not in (None, _DEFAULT_NAME):
            raise Unsupported(
                f"{key} in {folder} is of an adapter named {match['adapter']!r}, which PEFT does not load either.",
                f"Save it with PEFT's save_pretrained, or take '.{match['adapter']}' out of the keys.",
            )
        name = f"{match['module']}.lora_{match['side']}.weight"
        if name in tensors:
            raise ConfigError(
                f"{folder} holds {name} twice, as {names[name]} and as {key}.", "Keep one of the two and save it again."
            )
        names[name], tensors[name] = key, _as_float32(stored, key, folder)
        empty += [] if stored.numel() else [name]
    _check_empty([name for name in empty if not _is_no_gate(name, tensors)], tensors, folder)
    if others:
        raise Unsupported(f"{folder} trains more than LoRA matrices: {', '.join(sorted(others)[:3])}.", _ONLY_PLAIN)
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    _check_pairs(tensors, folder)
    return tensors


def modules_of(tensors: Mapping[str, Tensor]) -> set[str]:
    """Names of the modules that matrices belong to."""
    return {name.rpartition(".lora_")[0] for name in tensors}


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(key, tensor) of every tensor of an adapter's files."""
    for file, keys in _files(folder).items():
        try:
            with safe_open(file, framework="pt") as tensors:
                present = set(tensors.keys())
                if missing := sorted((keys or set()) - present):
                    raise ConfigError(
                        f"{file} lacks {missing[0]}, which {SHARD_INDEX} places there.", "Copy or save all files again."
                    )
                for key in sorted(present):
                    yield key, tensors.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} cannot be read: {error}.", "Copy or save it again.") from error


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """An adapter's files with the keys that an index places in each. Raises ConfigError if one is missing."""
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: None}
    files: dict[Path, set[str] | None]
    if (folder / SHARD_INDEX).is_file():
        files = _indexed(folder)
    else:
        shards = {name: match for name in _names(folder) if (match := _SHARD.fullmatch(name))}
        totals = {int(match[2]) for match in shards.values()}
        numbers = {int(match[1]) for match in shards.values()}
        if not shards:
            raise ConfigError(
                f"{folder} has no {WEIGHTS}.",
                "Pickled adapters (adapter_model.bin) are not read: save it again with safe_serialization=True.",
            )
        if len(totals) != 1 or numbers != set(range(1, max(totals) + 1)) or len(shards) != max(totals):
            raise ConfigError(
                f"{folder} holds {counted(len(shards), 'shard')} of {max(totals)}: {', '.join(sorted(shards)[:3])}.",
                "Copy all of them, or save it again.",
            )
        files = dict.fromkeys((folder / name for name in sorted(shards)), None)
    if missing := [file for file in files if not file.is_file()]:
        raise ConfigError(f"{folder} lacks {missing[0].name}, which its index names.", "Copy all files.")
    return files


def _indexed(folder: Path) -> dict[Path, set[str] | None]:
    files: dict[Path, set[str]] = {}
    try:
        places = dict(json.loads((folder / SHARD_INDEX).read_text())["weight_map"])
        for key, name in places.items():
            if Path(name).name != name:
                raise ValueError(f"{name!r} is not the name of a file beside it")
            files.setdefault(folder / name, set()).add(key)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder / SHARD_INDEX} cannot be read: {error!r}.", "Copy or save it again.") from error
    return {**files}


def _names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()] if folder.is_dir() else []


def _as_float32(tensor: Tensor, key: str, folder: Path) -> Tensor:
    """A tensor of any floating type as PEFT loads it. Raises ConfigError for other types and for values that are not
    finite."""
    if not tensor.dtype.is_floating_point:
        raise ConfigError(
            f"{key} in {folder} is stored as {dtype_name(tensor.dtype)}.",
            "Save the adapter in a floating type: float32, bfloat16, float16.",
        )
    wide = tensor.float()
    if not bool(torch.isfinite(wide).all()):
        raise ConfigError(
            f"{key} in {folder} holds values that are not finite in float32.", "Use an earlier checkpoint."
        )
    return wide


def _is_no_gate(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether an empty matrix is of a gate that the experts do not have."""
    module = name.rpartition(".lora_")[0]
    pair = [tensors.get(f"{module}.lora_{side}.weight") for side in "AB"]
    return module.endswith(_MAY_BE_EMPTY) and all(matrix is not None and not matrix.numel() for matrix in pair)


def _check_empty(empty: list[str], tensors: Mapping[str, Tensor], folder: Path) -> None:
    if empty:
        raise ConfigError(
            f"{empty[0]} in {folder} is empty: shape {list(tensors[empty[0]].shape)} "
            f"({len(empty)} of its {len(tensors)} matrices are).",
            "DeepSpeed ZeRO-3 or FSDP saved it without gathering the parameters. Consolidate them: "
            "zero_to_fp32.py of its checkpoint, or stage3_gather_16bit_weights_on_model_save, and save it again.",
        )


def _check_pairs(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raises ConfigError for a pair that is not whole, or whose ranks differ."""
    if not tensors:
        raise ConfigError(f"{folder} holds no LoRA matrices.", "Save the adapter again.")
    for module in sorted(modules_of(tensors)):
        names = [f"{module}.lora_{side}.weight" for side in "AB"]
        if missing := [name for name in names if name not in tensors]:
            raise ConfigError(f"{folder} lacks {missing[0]}, whose other matrix it holds.", "Save the adapter again.")
        a, b = (tensors[name] for name in names)
        if a.ndim != b.ndim or a.ndim not in (2, 3) or a.shape[-2] != b.shape[-1]:
            raise ConfigError(
                f"{names[0]} and {names[1]} in {folder} have the shapes {list(a.shape)} and {list(b.shape)}.",
                "A of [rank, inputs] and B of [outputs, rank] are a pair: save the adapter again.",
            )
