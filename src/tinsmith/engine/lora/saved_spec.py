"""The spec of an adapter in a folder: from its config, and from the names and shapes of its tensors.

Imports no torch: the API process reads the spec of an imported adapter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tinsmith.engine.base import LoraSpec
from tinsmith.engine.model_parts import HEAD, PARTS, parts_of_sites
from tinsmith.errors import NotFound, Unsupported

PREFIX = "base_model.model."
"""Start of the names of an adapter's tensors in PEFT's format."""
_DENSE = {
    "attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj"},
    "unembed": {HEAD},
}
"""Modules of Llama and its relatives, whose adapters are recognized without reading the weights."""
_IGNORED_KEYS = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "target_modules", "lora_dropout", "megatron_core", "qalora_group_size", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "fan_in_fan_out",
}  # fmt: skip
"""PEFT settings that are read here, or that alone do not change the meaning of the matrices: `fan_in_fan_out` says how
the base model stores its own."""
_ALLOWED_VALUES = {"bias": ["none"], "init_lora_weights": [True, "gaussian", "orthogonal", "eva"]}
"""PEFT settings with the values that are accepted. Any other setting must be empty: an unknown one may mean
anything."""


def read_spec(folder: Path) -> LoraSpec:
    """Read the spec of an adapter folder, which PEFT may have written. A part is trained if one module of it is.

    Raises NotFound if the folder holds no adapter, Unsupported for other kinds of adapter.
    """
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        rank, alpha, modules = int(config["r"]), float(config["lora_alpha"]), set(config["target_modules"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise NotFound(f"{folder} holds no readable adapter: {error!r}", "Save it again.") from error
    check_settings(config, folder)
    if completed_modules(modules):
        parts, separate = {part for part, leaves in _DENSE.items() if leaves & modules}, False
    else:
        shapes = stored_shapes(folder)
        parts = parts_of_sites(name.rpartition(".lora_")[0] for name in shapes)
        separate = any(_is_separate(name, shape) for name, shape in shapes.items())
    if config.get("peft_type", "LORA") != "LORA" or not parts:
        raise Unsupported(
            f"{folder} holds a {config.get('peft_type')} adapter of {sorted(modules)}.",
            "Supported are plain LoRA adapters of attention, MLP and head, in any combination.",
        )
    trained = {f"train_{part}": part in parts for part in PARTS}
    return LoraSpec(rank=rank, seed=0, alpha=alpha, **trained, separate_experts=separate)


def check_settings(config: Mapping[str, Any], source: Path) -> None:
    """Raises Unsupported for an adapter_config.json with settings that change what the matrices mean."""
    changed = {key: value for key, value in config.items() if value and key not in _IGNORED_KEYS}
    if other := [f"{key}={value!r:.40}" for key, value in changed.items() if value not in _ALLOWED_VALUES.get(key, ())]:
        raise Unsupported(
            f"{source} holds an adapter with {', '.join(other)}.",
            "Only plain LoRA is supported. PEFT converts pissa and olora adapters to plain ones when it saves "
            "them with path_initial_model_for_weight_conversion.",
        )


def completed_modules(modules: Set[str]) -> set[str]:
    """All modules of the parts of a dense model that an adapter has some modules of; empty for other models."""
    if not modules <= set[str]().union(*_DENSE.values()):
        return set()
    return {leaf for leaves in _DENSE.values() if leaves & modules for leaf in leaves}


def stored_shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes of an adapter's tensors by name without PEFT's prefix. Raises NotFound if the file cannot be read."""
    try:
        with safe_open(folder / "adapter_model.safetensors", framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return {name.removeprefix(PREFIX): tensor.get_shape() for name, tensor in slices.items()}
    except (OSError, SafetensorError) as error:
        raise NotFound(f"{folder} holds no readable adapter: {error!r}", "Save it again.") from error


def _is_separate(name: str, shape: list[int]) -> bool:
    """Whether a tensor is the matrix on the hidden side of experts that do not share it."""
    site, _, matrix = name.rpartition(".lora_")
    parent, _, leaf = site.rpartition(".")
    on_hidden_side = matrix.startswith("B" if leaf == "w2" else "A")
    return parent.rpartition(".")[2] == "experts" and on_hidden_side and len(shape) == 3 and shape[0] > 1
