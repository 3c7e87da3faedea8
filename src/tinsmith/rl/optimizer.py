"""How weights are stepped: settings of AdamW, and the learning rate of each step."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tinsmith.settings import Needs, Settings


class OptimizerConfig(Settings):
    """AdamW and the course of its learning rate."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """At its highest."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: level, or falling to `min_ratio` of its height at the end of the run."""
    min_ratio: Annotated[float, Needs("schedule", ("linear", "cosine"))] = Field(default=0.0, ge=0, le=1)
    """How much of it is left at the end of a schedule that falls."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which it rises from 0."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """The same as a share of the run's steps, rounded down; one of both."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled."""
    grad_clip_norm: float = Field(default=0.0, ge=0)
    """Largest norm of the whole gradient; 0 is no clipping. Losses are sums over tokens, so norms are large."""

    @model_validator(mode="after")
    def _one_warmup(self) -> OptimizerConfig:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("warmup_steps and warmup_ratio are two ways to say one thing; leave out one")
        return self

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate of step `step` of `steps`, counted from 1."""
        warmup = self.warmup_steps or int(self.warmup_ratio * steps)
        if step <= warmup:
            return self.learning_rate * step / warmup
        done = min(1.0, (step - 1 - warmup) / max(1, steps - warmup))
        left = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[self.schedule]
        floor = 1.0 if self.schedule == "constant" else self.min_ratio
        return self.learning_rate * (floor + (1.0 - floor) * left)
