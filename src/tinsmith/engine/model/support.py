"""Which models are served, as far as config and parts tell. What these cannot tell, `models` finds by computing.

Attention here looks at everything before a token, and rotations are the same at every length. A model that is otherwise
only from some length on is served up to that length, where both are the same mathematics.
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
"""Of transformers' `layer_types`."""

HINT = "Serve a dense model of the Llama, Qwen2, Qwen3 or Mistral kind."


def context_length(source: str, config: PreTrainedConfig) -> int:
    """Of the longest row that is computed here as the model means it."""
    settings = config.to_dict()
    claimed = int(settings["max_position_embeddings"])
    bounds = dict(_bounds(settings))
    length = min([claimed, *bounds])
    if length < claimed:
        log.warning("%s is served up to %d tokens and not %d: %s.", source, length, claimed, bounds[length])
    return length


def _bounds(settings: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Lengths from which on the model is another one, each with the reason."""
    window, kinds = settings.get("sliding_window"), settings.get("layer_types")
    slides = "sliding_attention" in kinds if kinds else settings.get("use_sliding_window", True)
    if window and slides:
        yield int(window), "beyond its sliding window attention would see what it must not"
    rope = settings.get("rope_parameters") or {}
    for table in (rope, *(one for one in rope.values() if isinstance(one, dict))):  # one, or one for each type of layer
        if table.get("rope_type") == "longrope":
            length = int(table["original_max_position_embeddings"])
            yield length, "beyond it all rotations change (longrope), and rows of one pass have one kind"


def check(source: str, model: PreTrainedModel) -> None:
    """Raises Unsupported for a model that names what is not computed here."""
    what = f"{source} ({model.config.model_type})"
    for fault in _faults(model):
        raise Unsupported(f"{what} {fault}.", HINT)


def _faults(model: PreTrainedModel) -> Iterator[str]:
    settings = model.config.to_dict()
    if others := set(settings.get("layer_types") or ()) - LAYERS:
        yield f"has layers of {', '.join(sorted(others))}"
    if caps := [f"{name} {value}" for name, value in settings.items() if "softcap" in name and value]:
        yield f"bends its scores or logits ({', '.join(caps)})"
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        yield "has no head that is one matrix" if not isinstance(head, nn.Linear) else "has a bias in its head"
    known = {name for names in PROJECTIONS.values() for name in names}
    linear, others = _matrices(model)
    if others:
        yield f"has weights that no adapter reaches, as experts or routers: {', '.join(sorted(others))}"
    if linear != known:
        yield f"has the projections {sorted(linear)}, not {sorted(known)}"


def _matrices(model: PreTrainedModel) -> tuple[set[str], set[str]]:
    """Names of the body's linear modules, and of its weights that stand in no linear module, embedding or norm."""
    linear, others = set[str](), set[str]()
    for path, module in model.base_model.named_modules():
        if isinstance(module, nn.Linear):
            linear.add(path.rpartition(".")[2])
        elif module is not model.get_input_embeddings() and not type(module).__name__.endswith("Norm"):
            place = ".".join(part for part in path.split(".") if not part.isdigit())
            matrices = (name for name, one in module.named_parameters(recurse=False) if one.ndim > 1)
            others |= {f"{place}.{name}" for name in matrices}
    return linear, others
