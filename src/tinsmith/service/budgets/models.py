"""Memory of the models in training of one engine: what each takes, and which are evicted. Arithmetic on records.

An evicted model is on disk with its optimizer state, and returns to the engine with its next request. Least recently
used models are evicted first. An accumulated gradient is not on disk: its requests are replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tinsmith.engine.base import LoraSpec, ModelCard
from tinsmith.engine.memory_plan import BYTES_PER_PARAMETER
from tinsmith.errors import Busy, Forbidden
from tinsmith.plurals import counted, display_bytes

SILENT_IDLE_S = 120.0
"""Seconds without a request after which a model whose client is silent is evicted."""
ACTIVE_S = 120.0
"""A model with a request within this time counts as in use when another one is created."""
RETRY_S = 10.0
"""Time after which a client repeats a refused create_model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """A model in training: what it takes, and who needs it."""

    id: str
    size_bytes: int
    unused_s: float
    """Seconds since its last request."""
    is_loaded: bool = True
    """Whether the engine has it."""
    is_queued: bool = False
    """Whether requests of it wait or run."""
    is_silent: bool = False
    """Whether its client is silent, or its session has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory of the models of one engine."""

    used_bytes: int
    limit_bytes: int
    """0 for no limit."""
    evicted: int
    """Models that are on disk only."""


def model_bytes(lora: LoraSpec, card: ModelCard) -> int:
    """Memory of a model after its first step; 0 if the engine does not say how many parameters it has."""
    trained = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
    counts = {part: count for part, count in card.parameters_per_rank.items() if trained[part]}
    if lora.separate_experts and "mlp" in counts:
        counts["mlp"] = card.separate_mlp_per_rank
    return BYTES_PER_PARAMETER * lora.rank * sum(counts.values())


def memory_limit(setting: int | None, card: ModelCard) -> int | None:
    """The budget of the models of an engine: the setting, or what the plan of its GPU leaves them, or half of what was
    free when the engine was loaded."""
    if setting is not None:
        return setting
    return card.memory.models if card.memory is not None else card.free_bytes // 2 or None


def idle_models(models: Iterable[ModelUse], idle_s: float) -> list[str]:
    """The models to evict because nobody uses them."""

    def is_idle(model: ModelUse) -> bool:
        patience = min(idle_s, SILENT_IDLE_S) if model.is_silent else idle_s
        return model.is_loaded and not model.is_queued and model.unused_s >= patience

    return [model.id for model in models if is_idle(model)]


def models_to_evict(
    models: Sequence[ModelUse], size_bytes: int, limit: int | None, pinned: Iterable[str]
) -> list[str] | None:
    """The models to evict so that one of `size_bytes` fits; None if it cannot fit beside the pinned ones.

    Models without queued requests go first, then the least recently used.
    """
    pinned = set(pinned)
    excess = 0 if limit is None else sum(model.size_bytes for model in models if model.is_loaded) + size_bytes - limit
    evictable = [model for model in models if model.is_loaded and model.id not in pinned]
    evictable.sort(key=lambda model: (model.is_queued, -model.unused_s))
    evicted = []
    for model in evictable:
        if excess <= 0:
            break
        evicted.append(model.id)
        excess -= model.size_bytes
    return None if excess > 0 else evicted


def check_new_model(models: Iterable[ModelUse], size_bytes: int, limit: int | None) -> None:
    """Raise Forbidden if a new model is larger than the budget, Busy if models in use leave no room for it."""
    if limit is None:
        return
    if size_bytes > limit:
        raise Forbidden(
            f"The model needs {display_bytes(size_bytes)} in training; model_memory is {display_bytes(limit)}.",
            "Use a lower rank, or train fewer modules: train_attn, train_mlp, train_unembed.",
        )
    active = [model for model in models if model.is_queued or (model.unused_s < ACTIVE_S and not model.is_silent)]
    used = sum(model.size_bytes for model in active)
    if used + size_bytes > limit:
        raise Busy(
            f"The model needs {display_bytes(size_bytes)} in training; {counted(len(active), 'model')} in use: "
            f"{display_bytes(used)} of {display_bytes(limit)} (model_memory).",
            "Try again later, use a lower rank, or end sessions whose models are no longer needed.",
            retry_after_ms=int(1000 * RETRY_S),
        )
