"""Checks whether a model is supported, from its config and modules; `loading` checks the rest by computing.

Attention here sees all earlier tokens, and rotary embeddings are the same at every length. A model that differs only
beyond some length is served up to that length.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tinsmith.errors import Unsupported

log = logging.getLogger(__name__)

PROJECTIONS = {
    "attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}

LAYERS = {"full_attention", "sliding_attention"}
"""Supported values of transformers' `layer_types`."""

HINT = "Serve a dense model of the Llama, Qwen2, Qwen3 or Mistral family."


def context_length(source: str, config: PreTrainedConfig) -> int:
    """Length of the longest row that is computed exactly as the model defines it."""
    settings = config.to_dict()
    maximum = int(settings["max_position_embeddings"])
    bounds = dict(_bounds(settings))
    length = min([maximum, *bounds])
    if length < maximum:
        log.warning("%s is served up to %d tokens instead of %d: %s.", source, length, maximum, bounds[length])
    return length


def _bounds(settings: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Lengths beyond which the model is computed differently, each with the reason."""
    window, types = settings.get("sliding_window"), settings.get("layer_types")
    slides = "sliding_attention" in types if types else settings.get("use_sliding_window", True)
    if window and slides:
        yield int(window), "sliding-window attention is not supported"
    rope = settings.get("rope_parameters") or {}
    # One table, or one for each type of layer.
    for table in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if table.get("rope_type") == "longrope":
            length = int(table["original_max_position_embeddings"])
            yield length, "longrope changes all rotations beyond it, and all rows of a pass share one table"


def check(source: str, model: PreTrainedModel) -> None:
    """Raises Unsupported for a model with unsupported features."""
    for fault in _faults(model):
        raise Unsupported(f"{source} ({model.config.model_type}) {fault}.", HINT)


def _faults(model: PreTrainedModel) -> Iterator[str]:
    settings = model.config.to_dict()
    if others := set(settings.get("layer_types") or ()) - LAYERS:
        yield f"has layers of {', '.join(sorted(others))}"
    if caps := [f"{name} {value}" for name, value in settings.items() if "softcap" in name and value]:
        yield f"caps its scores or logits ({', '.join(caps)})"
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        yield "has no linear output head" if not isinstance(head, nn.Linear) else "has a bias in its output head"
    projections = {name for names in PROJECTIONS.values() for name in names}
    linear, others = _matrices(model)
    if others:
        yield f"has weights that no adapter covers, for example in MoE layers: {', '.join(sorted(others))}"
    if linear != projections:
        yield f"has the projections {sorted(linear)} instead of {sorted(projections)}"


def _matrices(model: PreTrainedModel) -> tuple[set[str], set[str]]:
    """Names of the body's linear modules, and of its matrices outside linear modules, embeddings and norms."""
    linear, others = set[str](), set[str]()
    for path, module in model.base_model.named_modules():
        if isinstance(module, nn.Linear):
            linear.add(path.rpartition(".")[2])
        elif module is not model.get_input_embeddings() and not type(module).__name__.endswith("Norm"):
            place = ".".join(part for part in path.split(".") if not part.isdigit())
            matrices = (name for name, weight in module.named_parameters(recurse=False) if weight.ndim > 1)
            others |= {f"{place}.{name}" for name in matrices}
    return linear, others
