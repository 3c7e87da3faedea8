"""Settings of an engine: one base model on one device."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Literal

from tinsmith.engine_options import EngineOptions
from tinsmith.errors import ConfigError

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def cache_folder() -> Path:
    """Folder of converted models: $TINSMITH_CACHE, else ~/.cache/tinsmith."""
    return Path(os.environ.get("TINSMITH_CACHE", "~/.cache/tinsmith")).expanduser()


def converted_default() -> Path:
    """Where the default model is, once it was converted from a wheel, on machines without the hub."""
    return cache_folder() / "smollm2-135m-instruct"


def check_source(source: str) -> None:
    """Raises ConfigError for the path of a folder or a GGUF file that does not exist, and for a folder without a model,
    such as an adapter's."""
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"There is no GGUF file {path}.", "Check the path.")
    elif not path.is_dir() and (path.is_absolute() or source.startswith(".")):
        raise ConfigError(f"There is no folder {path}.", "Give a folder with config.json, a GGUF file or a hub id.")
    elif not path.is_dir() or (path / "config.json").is_file():
        return
    elif (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"{path} holds an adapter, not a model.",
            f"Merge it into its base model: tinsmith export {shlex.quote(str(path))} --format merged --to FOLDER; "
            "or import it into a server of its base model: tinsmith import --help",
        )
    else:
        raise ConfigError(
            f"{path} holds no model: it has no config.json.", "Give the folder of one, as transformers saves it."
        )


class EngineConfig(EngineOptions):
    """One base model on one device."""

    source: str = DEFAULT_MODEL
    """Hub id, folder or GGUF file."""

    model_memory: int | None = None
    """Bytes of the models in training; None: what the memory plan of a GPU leaves them."""

    engines: int = 1
    """Engines that share the device."""

    vllm_place: Literal["none", "beside", "apart"] = "none"
    """Whether vLLM samples for this engine: on its GPU, or on others."""

    vllm_gpus: int = 1
    """GPUs that hold a part of vLLM's model each."""

    part: Literal["all", "training", "sampling"] = "all"
    """What the process does, where others do the rest."""

    keeps_checks: bool = False
    """Whether checks that the model has passed at an earlier load are not repeated."""

    shards: int = 1
    """GPUs that hold a slice of the model each."""

    kind: Literal["torch", "fake"] = "torch"
    """`torch` runs a model; `fake` computes numbers without one, for tests without torch."""
