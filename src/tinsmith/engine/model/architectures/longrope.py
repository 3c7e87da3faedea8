"""Rotary embeddings of rope type longrope, for passes over rows of all lengths.

A row up to `original_max_position_embeddings` takes the short factors; a longer row takes the long factors at all its
positions. transformers decides this by the largest position of a pass. Here it is decided for each row, when the pass
is packed: a token of a row with long factors gives the bitwise complement of its position, which is negative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tinsmith.errors import Unsupported

CHANGING = {"dynamic", "longrope"}
"""Rope types whose modules change their factors with the length of a pass."""


class LongRope(nn.Module):
    """A rotary embedding of transformers that gives each token the factors of its row."""

    def __init__(self, rotary: nn.Module, original_context: int) -> None:
        super().__init__()
        self.rotary, self._original_context = rotary, original_context

    def forward(self, hidden: Tensor, position_ids: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
        """Cosines and sines at positions int64 [1, T]; `position_ids` without complements are computed as they are."""
        is_long = position_ids < 0
        if not bool(is_long.any()):
            return self.rotary(hidden, position_ids, **settings)
        positions = torch.where(is_long, ~position_ids, position_ids)
        # One more position, which makes the pass a long one whatever its positions are.
        beyond = positions.new_full((*positions.shape[:-1], 1), self._original_context)
        with_long = self.rotary(hidden, torch.cat([positions, beyond], -1), **settings)
        with_short = self.rotary(hidden, positions.clamp(max=self._original_context - 1), **settings)
        cosines, sines = (
            torch.where(is_long[..., None], long[..., :-1, :], short)
            for long, short in zip(with_long, with_short, strict=True)
        )
        return cosines, sines


def original_contexts(config: PreTrainedConfig, maximum: int) -> list[int]:
    """Lengths below `maximum`, rising, beyond which the config's rotary embeddings take their long factors."""
    rope = config.to_dict().get("rope_parameters") or {}
    # One table, or one for each type of layer.
    tables = (rope, *(value for value in rope.values() if isinstance(value, dict)))
    lengths = {
        int(table.get("original_max_position_embeddings") or maximum)
        for table in tables
        if table.get("rope_type") == "longrope"
    }
    return sorted(length for length in lengths if length < maximum)


def install(source: str, model: PreTrainedModel, original_context: int) -> None:
    """Let the model's rotary embeddings take the factors of each row; nothing if `original_context` is 0."""
    if not original_context:
        return
    rotaries = [(path, module) for path, module in model.named_modules() if "longrope" in _rope_types(module)]
    if not rotaries:
        raise Unsupported(
            f"{source} ({model.config.model_type}) has rope type longrope, but no module that computes it.",
            "Serve it with path: general.",
        )
    for path, module in rotaries:
        model.set_submodule(path, LongRope(module, original_context))


def keeps_factors(model: nn.Module) -> bool:
    """Whether a rotary embedding of the model changes its factors with the length of a pass."""
    return any(_rope_types(module) & CHANGING for module in model.modules())


def _rope_types(module: nn.Module) -> set[str]:
    """The rope types that a rotary embedding computes: one, or one for each type of layer."""
    kinds = vars(module).get("rope_type")
    return set(kinds.values()) if isinstance(kinds, dict) else {kinds} if isinstance(kinds, str) else set()
