"""The spec of an adapter in a folder: from its config, and from the names and shapes of its tensors.

Imports no torch: the API process reads the spec of an imported adapter.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tinsmith.engine.base import LoraSpec
from tinsmith.engine.lora.peft_settings import read_settings
from tinsmith.engine.model_parts import PARTS, parts_of_sites
from tinsmith.errors import NotFound, Unsupported

PREFIX = "base_model.model."
"""Start of the names of an adapter's tensors in PEFT's format."""


def read_spec(folder: Path) -> LoraSpec:
    """Read the spec of an adapter folder in this engine's form. A part is trained if one module of it is.

    Raises NotFound if the folder holds no adapter, Unsupported for other kinds of adapter.
    """
    settings = read_settings(read_config(folder), folder)
    shapes = stored_shapes(folder)
    ranks = {
        name.removesuffix(".lora_A.weight"): shape[-2]
        for name, shape in shapes.items()
        if name.endswith(".lora_A.weight") and len(shape) > 1
    }
    separate = any(_is_separate(name, shape) for name, shape in shapes.items())
    spec = spec_of({site: (settings.alpha_of(site), rank) for site, rank in ranks.items()}, separate=separate)
    if spec is None:
        raise Unsupported(
            f"{folder} holds an adapter of {', '.join(sorted(ranks)[:3]) or 'nothing'}.",
            "Supported are plain LoRA adapters of attention, MLP and head, in any combination.",
        )
    return spec


def spec_of(sites: Mapping[str, tuple[float, int]], *, separate: bool) -> LoraSpec | None:
    """The spec of an adapter by alpha and rank of each of its sites; None if one of the names is no site's.

    The rank is the largest. Alpha / rank is the scale that most sites have.
    """
    parts = parts_of_sites(sites)
    if not parts:
        return None
    rank = max(rank for _, rank in sites.values())
    scales = Counter(alpha / rank for alpha, rank in sites.values())
    scale = max(scales, key=lambda each: (scales[each], each))
    exact = (alpha for alpha, own in sites.values() if own == rank and alpha / own == scale)
    trained = {f"train_{part}": part in parts for part in PARTS}
    return LoraSpec(rank=rank, seed=0, alpha=next(exact, scale * rank), **trained, separate_experts=separate)


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a folder. Raises NotFound if it cannot be read."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        return dict(config)
    except (OSError, ValueError, TypeError) as error:
        raise NotFound(
            f"{folder} holds no adapter: adapter_config.json cannot be read ({error!r}).",
            "Give a folder that PEFT's save_pretrained wrote, or a checkpoint archive (.tar).",
        ) from error


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
