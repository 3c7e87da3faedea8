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

_HINT = "Serve a dense model of the Llama, Qwen2, Qwen3 or Mistral kind."


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


def check(source: str, model: PreTrainedModel) -> None:
    """Raises Unsupported for a model that names what is not computed here."""
    what = f"{source} ({model.config.model_type})"
    settings = model.config.to_dict()
    if others := set(settings.get("layer_types") or ()) - LAYERS:
        raise Unsupported(f"{what} has layers of {', '.join(sorted(others))}.", _HINT)
    linear = {name.rsplit(".", 1)[-1] for name, one in model.base_model.named_modules() if isinstance(one, nn.Linear)}
    expected = {name for names in PROJECTIONS.values() for name in names}
    if linear != expected:
        raise Unsupported(f"{what} has the projections {sorted(linear)}, not {sorted(expected)}.", _HINT)
