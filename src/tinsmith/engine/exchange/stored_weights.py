"""The weights of a base model, tensor by tensor, by their names in its files.

Weights in MXFP4 (gpt-oss) and in blocks of FP8 (DeepSeek) are converted by transformers, which loads the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from typing_extensions import override

from tinsmith.engine.images.tower import auto_class
from tinsmith.engine.model import quantization
from tinsmith.engine.model.sources import load_errors
from tinsmith.errors import ConfigError

INDEX = "model.safetensors.index.json"


class StoredWeights(Protocol):
    """Weights by name."""

    @property
    def names(self) -> Collection[str]:
        """The names of all."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of each; no two share memory."""
        ...


def read_weights(base: Path, config: PreTrainedConfig) -> StoredWeights:
    """The weights in a folder. Raises ConfigError if there are none, Unsupported for a quantised form that is not
    read."""
    if quantization.checkpoint_form(config):
        return _ConvertedWeights(base, config)
    return _FileWeights(base)


class _FileWeights(StoredWeights):
    """Each tensor is read when it is its turn, in the order of the files."""

    def __init__(self, base: Path) -> None:
        self._files: dict[str, Path] = {}
        for file in _weight_files(base):
            with safe_open(file, framework="pt") as tensors:
                self._files |= dict.fromkeys(tensors.keys(), file)

    @property
    @override
    def names(self) -> Collection[str]:
        return self._files.keys()

    @override
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for file in dict.fromkeys(self._files.values()):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    yield name, tensors.get_tensor(name)


class _ConvertedWeights(StoredWeights):
    """A quantised model in bfloat16, with the names of transformers' modules."""

    def __init__(self, base: Path, config: PreTrainedConfig) -> None:
        cpu, dtype = torch.device("cpu"), torch.bfloat16
        options = quantization.load_options(str(base), config, "none", cpu, dtype)
        with load_errors(str(base)):
            model = auto_class(config).from_pretrained(base, dtype=dtype, **options)
        self._tensors, seen = dict[str, Tensor](), set[int]()
        for name, tensor in model.state_dict().items():
            if tensor.data_ptr() not in seen:  # tied weights are stored once
                self._tensors[name] = tensor
                seen.add(tensor.data_ptr())

    @property
    @override
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    @override
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors.items()


def _weight_files(base: Path) -> list[Path]:
    if (base / INDEX).is_file():
        return [base / name for name in sorted(set(json.loads((base / INDEX).read_text())["weight_map"].values()))]
    if (base / "model.safetensors").is_file():
        return [base / "model.safetensors"]
    raise ConfigError(
        f"{base} has no model.safetensors.", "Save the base model with safetensors, and give its folder: --base."
    )
