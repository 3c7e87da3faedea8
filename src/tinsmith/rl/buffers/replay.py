"""Which batch is used next where batches may be used more than once: the one of the highest priority.

linear_decay            version - decay * uses
linear_decay_limited    the same, but never a batch used `limit` times; with `sigma`, its priority is drawn from a
                        normal distribution of that deviation around it, anew after each use
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from tinsmith.rl.policy import request_seed
from tinsmith.settings import Settings, unread


class ReplayConfig(Settings):
    """Using batches more than once."""

    enable: bool = False
    """By priority, in place of oldest first and once."""
    priority: Literal["linear_decay", "linear_decay_limited"] = "linear_decay"
    """`linear_decay`: the weights' version less `decay` for each use. `linear_decay_limited`: the same with some noise,
    and never after `limit` uses."""
    decay: float = Field(default=2.0, ge=0)
    """What one use counts, in versions."""
    limit: int = Field(default=3, ge=1)
    """Uses of a batch, in `linear_decay_limited`."""
    sigma: float = Field(default=0.0, ge=0)
    """Deviation of the noise in `linear_decay_limited`, in versions."""
    cooldown: float | None = Field(default=None, ge=0)
    """Seconds after a use until the batch may be used again; null is never."""
    size: int = Field(default=64, ge=1)
    """Batches kept; those of the lowest priority go first."""

    @model_validator(mode="after")
    def _read_together(self) -> ReplayConfig:
        if not self.enable:
            unread(self, "priority", "decay", "limit", "sigma", "cooldown", "size", without="enable: true")
        if self.priority == "linear_decay":
            unread(self, "limit", "sigma", without="priority linear_decay_limited")
        return self

    def value(self, version: int, uses: int, number: int, seed: int) -> float:
        """The priority of batch `number`, by weights of `version`, used so often; -inf: not again."""
        plain = version - self.decay * uses
        if self.priority == "linear_decay":
            return plain
        if uses >= self.limit:
            return float("-inf")
        noise = np.random.default_rng(request_seed(seed, number, uses)).normal() if self.sigma else 0.0
        return plain + self.sigma * float(noise)


class Waiting(Settings):
    """Which waiting batches are trained on."""

    capacity: int = Field(default=16, ge=1)
    """Batches sampled and not yet trained on, at which sampling waits; in every sync.style but `fixed`, which knows."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Leave out groups sampled by weights more updates older than those in training; null takes all. How many were left
    out is told in `buffer/dropped_groups`."""
    replay: ReplayConfig = ReplayConfig()
