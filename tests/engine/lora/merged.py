"""Weights of a model of transformers with an adapter merged in, differentiable in the adapter's matrices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tinsmith.engine.lora.adapter import LoraPair


def merged_weights(weights: Mapping[str, Tensor], pairs: Mapping[str, LoraPair], scale: float) -> dict[str, Tensor]:
    """The weights that an adapter changes, plus its s B A; `weights` are the model's parameters by name.

    The pairs of a stack of experts are called w1 (gate), w3 (up) and w2 (down), those of in_proj_qkv in_proj_q to _v.
    """
    deltas = {name: scale * pair.b @ pair.a for name, pair in pairs.items()}
    for name in [name for name in deltas if name.endswith(".in_proj_q")]:
        stem = name.removesuffix("q")
        deltas[f"{stem}qkv"] = torch.cat([deltas.pop(f"{stem}{part}") for part in "qkv"])
    changed = {f"{name}.weight": weights[f"{name}.weight"] + delta for name, delta in deltas.items() if delta.ndim == 2}
    for name in deltas:
        if name.endswith(".w1"):
            stack = name.removesuffix(".w1")
            wide = torch.cat([deltas[name], deltas[f"{stack}.w3"]], 1)
            changed[f"{stack}.gate_up_proj"] = weights[f"{stack}.gate_up_proj"] + wide
            changed[f"{stack}.down_proj"] = weights[f"{stack}.down_proj"] + deltas[f"{stack}.w2"]
    return changed
