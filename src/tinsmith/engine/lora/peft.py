"""Adapters and their optimizer state as folders in PEFT's format.

    adapter_config.json          read by PEFT and vLLM: r, lora_alpha, target_modules; rank_pattern and alpha_pattern
                                 of sites with a rank or a scale of their own
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight (r, in), .lora_B.weight (out, r), float32
    optimizer.safetensors        exp_avg and exp_avg_sq, flat, with the names of their sites in order, and the step
                                 count; only in training states

Folders are written atomically. `exchange.reading` reads them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tinsmith.atomic import atomic_folder, folder_size
from tinsmith.engine.lora.adapter import AdapterLayout
from tinsmith.engine.lora.peft_settings import patterns
from tinsmith.engine.lora.saved_spec import PREFIX
from tinsmith.errors import NotFound


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
    for name, pair in layout.own_pairs(master.cpu()).items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = pair.a.contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = pair.b.contiguous()
    with atomic_folder(folder) as scratch:
        save_file(tensors, scratch / "adapter_model.safetensors", metadata={"format": "pt"})
        if moments is not None:
            state = {
                "exp_avg": _without_padding(moments.exp_avg.cpu(), layout),
                "exp_avg_sq": _without_padding(moments.exp_avg_sq.cpu(), layout),
                "steps": torch.tensor(moments.steps),
            }
            sites = json.dumps([site.name for site in layout.sites if layout.rank_of(site)])
            save_file(state, scratch / "optimizer.safetensors", metadata={"sites": sites})
        (scratch / "adapter_config.json").write_text(json.dumps(_peft_config(layout, source), indent=2))
        return folder_size(scratch)


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


def _without_padding(flat: Tensor, layout: AdapterLayout) -> Tensor:
    """The elements of sites' own ranks, in order."""
    if layout.is_uniform:
        return flat
    return torch.cat([matrix.flatten() for pair in layout.own_pairs(flat).values() for matrix in (pair.a, pair.b)])


def _in_order(flat: Tensor, names: list[str] | None, layout: AdapterLayout) -> Tensor:
    """A flat tensor of the named sites, without padding, in `layout`. Raises KeyError for sites that the layout
    lacks."""
    own = {site.name: site for site in layout.sites if layout.rank_of(site)}
    if layout.is_uniform and names in (None, [*own]):
        return flat
    ordered = torch.zeros(layout.size, device="cpu")
    pairs, sites = layout.own_pairs(ordered), [own[name] for name in names or own]
    shapes = [shape for site in sites for shape in site.shapes(layout.rank_of(site))]
    pieces = iter(flat.split([math.prod(shape) for shape in shapes]))
    for site in sites:
        pair = pairs[site.name]
        for matrix in (pair.a, pair.b):
            matrix.copy_(next(pieces).view(matrix.shape))
    return ordered


def site_settings(layout: AdapterLayout) -> dict[str, object]:
    """PEFT's settings of an adapter whose modules have the names of sites: short ones where those mean no others."""
    ranks = {site.name: layout.rank_of(site) for site in layout.sites}
    left = {name.rpartition(".")[2] for name, rank in ranks.items() if not rank}
    own = {site.name: (rank, layout.alpha_of(site)) for site in layout.sites if (rank := layout.rank_of(site))}
    modules = {leaf if (leaf := name.rpartition(".")[2]) not in left else name for name in own}
    by_module = patterns(own, layout.spec.rank, layout.spec.alpha)
    return {"target_modules": sorted(modules), **{key: value for key, value in by_module.items() if value}}


def _peft_config(layout: AdapterLayout, source: str) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": layout.spec.rank,
        "lora_alpha": layout.spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        **site_settings(layout),
    }
