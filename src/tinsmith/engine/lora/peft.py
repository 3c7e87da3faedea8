"""Adapters and their optimizer state as folders in PEFT's format.

    adapter_config.json          read by PEFT and vLLM: r, lora_alpha, target_modules
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight (r, in), .lora_B.weight (out, r), float32
    optimizer.safetensors        exp_avg and exp_avg_sq, flat, with the names of their sites in order, and the step
                                 count; only in training states

Folders are written atomically.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinsmith.atomic import atomic_folder, folder_size
from tinsmith.engine.lora.adapter import AdapterLayout
from tinsmith.engine.lora.saved_spec import PREFIX
from tinsmith.errors import NotFound
from tinsmith.plurals import counted


@dataclass(frozen=True, slots=True)
class Moments:
    """AdamW's state: flat float32 tensors of the adapter's size, and the number of steps."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: int

    def copy(self) -> Moments:
        """The same state in its own memory."""
        return Moments(self.exp_avg.clone(), self.exp_avg_sq.clone(), self.steps)


def write(folder: Path, layout: AdapterLayout, master: Tensor, source: str, moments: Moments | None) -> int:
    """Write the adapter in `master` (float32 [size]) as a folder, replacing an existing one; returns its size in
    bytes."""
    tensors = {}
    for name, pair in layout.pairs(master.cpu()).items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = pair.a.contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = pair.b.contiguous()
    with atomic_folder(folder) as scratch:
        save_file(tensors, scratch / "adapter_model.safetensors", metadata={"format": "pt"})
        if moments is not None:
            state = {
                "exp_avg": moments.exp_avg.cpu(),
                "exp_avg_sq": moments.exp_avg_sq.cpu(),
                "steps": torch.tensor(moments.steps),
            }
            sites = json.dumps([site.name for site in layout.sites])
            save_file(state, scratch / "optimizer.safetensors", metadata={"sites": sites})
        (scratch / "adapter_config.json").write_text(json.dumps(_peft_config(layout, source), indent=2))
        return folder_size(scratch)


def read(folder: Path, layout: AdapterLayout) -> Tensor:
    """Read an adapter folder as a flat float32 [size] tensor in `layout`."""
    flat = torch.zeros(layout.size, device="cpu")
    try:
        tensors = load_file(folder / "adapter_model.safetensors")
        for name, pair in layout.pairs(flat).items():
            pair.a.copy_(shaped(tensors.pop(f"{PREFIX}{name}.lora_A.weight"), pair.a))
            pair.b.copy_(shaped(tensors.pop(f"{PREFIX}{name}.lora_B.weight"), pair.b))
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise NotFound(f"{folder} does not hold an adapter of this base model: {error!r}", "Save it again.") from error
    if tensors or not bool(torch.isfinite(flat).all()):
        fault = f"has {counted(len(tensors), 'unexpected tensor')}" if tensors else "holds values that are not finite"
        raise NotFound(f"The adapter in {folder} {fault}.", "Save it again.")
    return flat


def shaped(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor. Raises ValueError unless it has the shape of the other."""
    if tensor.shape != like.shape:
        raise ValueError(f"shape {tuple(tensor.shape)} instead of {tuple(like.shape)}")
    return tensor


def read_moments(folder: Path, layout: AdapterLayout) -> Moments:
    """Read the optimizer state in `layout`. Raises NotFound for a folder that was saved without it."""
    try:
        with safe_open(folder / "optimizer.safetensors", "pt") as file:
            sites = json.loads((file.metadata() or {}).get("sites", "null"))
            state = {name: file.get_tensor(name) for name in ("exp_avg", "exp_avg_sq", "steps")}
            exp_avg, exp_avg_sq = (_in_order(state[name], sites, layout) for name in ("exp_avg", "exp_avg_sq"))
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise NotFound(
            f"{folder} holds no optimizer state.", "Load it without optimizer, or use a path that save_state returned."
        ) from error
    return Moments(exp_avg, exp_avg_sq, int(state["steps"]))


def _in_order(flat: Tensor, sites: list[str] | None, layout: AdapterLayout) -> Tensor:
    """A flat tensor of the named sites in the order of `layout`. Raises KeyError for sites that the layout lacks."""
    if sites is None or sites == [site.name for site in layout.sites]:
        return flat
    by_name = {site.name: site for site in layout.sites}
    saved = AdapterLayout(layout.spec, tuple(by_name[name] for name in sites)).pairs(flat)
    ordered = torch.empty(layout.size, device="cpu")
    for name, pair in layout.pairs(ordered).items():
        pair.a.copy_(saved[name].a)
        pair.b.copy_(saved[name].b)
    return ordered


def _peft_config(layout: AdapterLayout, source: str) -> dict[str, object]:
    leaves = sorted({site.name.rpartition(".")[2] for site in layout.sites})
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
