"""Adapters and their optimizer state as folders in PEFT's format.

    adapter_config.json          read by PEFT and vLLM: r, lora_alpha, target_modules
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight (r, in), .lora_B.weight (out, r), float32
    optimizer.safetensors        exp_avg and exp_avg_sq, flat, and the step count; only in training states

Folders are written atomically.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinsmith.atomic import atomic_folder, folder_size
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.lora.adapter import HEAD, AdapterLayout
from tinsmith.engine.model.support import PROJECTIONS
from tinsmith.errors import NotFound, Unsupported

_PREFIX = "base_model.model."
_IGNORED_KEYS = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "target_modules", "lora_dropout", "megatron_core", "qalora_group_size", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config",
}  # fmt: skip
"""PEFT settings that are read here, or that alone do not change the meaning of the matrices."""
_ALLOWED_VALUES = {"bias": ["none"], "init_lora_weights": [True, "gaussian", "orthogonal", "eva"]}
"""PEFT settings with the values that are accepted. Any other setting must be empty: an unknown one may mean
anything."""


@dataclass(frozen=True, slots=True)
class Moments:
    """AdamW's state: flat float32 tensors of the adapter's size, and the number of steps."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: int


def write(folder: Path, layout: AdapterLayout, master: Tensor, source: str, moments: Moments | None) -> int:
    """Write the adapter in `master` (float32 [size]) as a folder, replacing an existing one; returns its size in
    bytes."""
    tensors = {}
    for name, pair in layout.pairs(master.cpu()).items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = pair.a.contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = pair.b.contiguous()
    with atomic_folder(folder) as scratch:
        save_file(tensors, scratch / "adapter_model.safetensors", metadata={"format": "pt"})
        if moments is not None:
            state = {
                "exp_avg": moments.exp_avg.cpu(),
                "exp_avg_sq": moments.exp_avg_sq.cpu(),
                "steps": torch.tensor(moments.steps),
            }
            save_file(state, scratch / "optimizer.safetensors")
        (scratch / "adapter_config.json").write_text(json.dumps(_peft_config(layout, source), indent=2))
        return folder_size(scratch)


def read_spec(folder: Path) -> LoraSpec:
    """Read the spec of an adapter folder, which PEFT may have written.

    Raises NotFound if the folder holds no adapter, Unsupported for other kinds of adapter.
    """
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        rank, alpha, modules = int(config["r"]), float(config["lora_alpha"]), set(config["target_modules"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise NotFound(f"{folder} holds no readable adapter: {error!r}", "Save it again.") from error
    parts = {"train_attn": set(PROJECTIONS["attn"]), "train_mlp": set(PROJECTIONS["mlp"]), "train_unembed": {HEAD}}
    flags = {flag: leaves <= modules for flag, leaves in parts.items()}
    covered = {leaf for flag, leaves in parts.items() if flags[flag] for leaf in leaves}
    changed = {key: value for key, value in config.items() if value and key not in _IGNORED_KEYS}
    if other := [f"{key}={value!r:.40}" for key, value in changed.items() if value not in _ALLOWED_VALUES.get(key, ())]:
        raise Unsupported(
            f"{folder} holds an adapter with {', '.join(other)}.",
            "Only plain LoRA is supported. PEFT converts pissa and olora adapters to plain ones when it saves "
            "them with path_initial_model_for_weight_conversion.",
        )
    if config.get("peft_type", "LORA") != "LORA" or covered != modules or not covered:
        raise Unsupported(
            f"{folder} holds a {config.get('peft_type')} adapter of {sorted(modules)}.",
            "Supported are plain LoRA adapters of attention, MLP and head, each as a whole, in any combination.",
        )
    return LoraSpec(rank=rank, seed=0, alpha=alpha, **flags)


def read(folder: Path, layout: AdapterLayout) -> Tensor:
    """Read an adapter folder as a flat float32 [size] tensor in `layout`."""
    flat = torch.zeros(layout.size, device="cpu")
    try:
        tensors = load_file(folder / "adapter_model.safetensors")
        for name, pair in layout.pairs(flat).items():
            pair.a.copy_(_shaped(tensors.pop(f"{_PREFIX}{name}.lora_A.weight"), pair.a))
            pair.b.copy_(_shaped(tensors.pop(f"{_PREFIX}{name}.lora_B.weight"), pair.b))
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise NotFound(f"{folder} does not hold an adapter of this base model: {error!r}", "Save it again.") from error
    if tensors or not bool(torch.isfinite(flat).all()):
        fault = f"has {len(tensors)} unexpected tensors" if tensors else "holds values that are not finite"
        raise NotFound(f"The adapter in {folder} {fault}.", "Save it again.")
    return flat


def _shaped(tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.shape != like.shape:
        raise ValueError(f"shape {tuple(tensor.shape)} instead of {tuple(like.shape)}")
    return tensor


def read_moments(folder: Path) -> Moments:
    """Read the optimizer state. Raises NotFound for a folder that was saved without it."""
    try:
        state = load_file(folder / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise NotFound(
            f"{folder} holds no optimizer state.", "Load it without optimizer, or use a path that save_state returned."
        ) from error
    return Moments(state["exp_avg"], state["exp_avg_sq"], int(state["steps"]))


def _peft_config(layout: AdapterLayout, source: str) -> dict[str, object]:
    leaves = sorted({name.rpartition(".")[2] for name, _, _ in layout.shapes})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": layout.spec.rank,
        "lora_alpha": layout.spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": leaves,
        "inference_mode": True,
    }
