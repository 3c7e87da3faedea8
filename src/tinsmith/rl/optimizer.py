"""Settings of AdamW, and the learning rate of each step."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tinsmith.settings import Needs, Settings

_RATES = ((0.3, 5e-4), (1.0, 3e-4), (4.0, 2e-4), (15.0, 1e-4), (math.inf, 5e-5))
"""Learning rates of LoRA by the billions of parameters below which they apply: larger models need smaller ones."""
_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BbMm])(?![A-Za-z0-9])")


def rate_by_name(model: str) -> float | None:
    """The usual learning rate of LoRA for the size in a model's name; None if the name has no size.

    Example: rate_by_name("HuggingFaceTB/SmolLM2-135M-Instruct") == 5e-4
    """
    sizes = _SIZE.findall(model.rpartition("/")[2])
    if not sizes:
        return None
    number, unit = sizes[0]
    billions = float(number) / (1 if unit in "Bb" else 1000)
    return next(rate for bound, rate in _RATES if billions < bound)


class OptimizerConfig(Settings):
    """AdamW and its learning-rate schedule."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """Learning rate after warm-up, the highest of the run. Not set: by the size in the model's name, from 5e-4
    (SmolLM2-135M) to 5e-5 (Qwen3-32B), and 1e-4 if the name has none; the console says it, and run.yaml records it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after warm-up: `constant`, or `linear` or `cosine` decay to min_ratio x learning_rate."""
    min_ratio: Annotated[float, Needs("schedule", ("linear", "cosine"))] = Field(default=0.0, ge=0, le=1)
    """Fraction of the learning rate at the end of a linear or cosine schedule."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of the linear warm-up from 0."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Warm-up steps as a fraction of the run's steps, rounded down; in place of warmup_steps."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Term added to the denominator for numerical stability."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Coefficient of the decoupled weight decay."""
    grad_clip_norm: float = Field(default=0.0, ge=0)
    """Clip the norm of the whole gradient to this; 0: no clipping. With `aggregate: token_sum` norms are large, because
    the loss is a sum over tokens."""

    @model_validator(mode="after")
    def _check_warmup(self) -> OptimizerConfig:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("warmup_steps and warmup_ratio both set the warm-up; leave out one")
        return self

    def for_model(self, name: str) -> OptimizerConfig:
        """The settings with the learning rate of the model `name`, if none is set. It still counts as not set."""
        rate = None if "learning_rate" in self.model_fields_set else rate_by_name(name)
        if rate is None:
            return self
        result = self.model_copy(update={"learning_rate": rate})
        result.model_fields_set.discard("learning_rate")
        return result

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate of step `step` of `steps`, counted from 1."""
        warmup = self.warmup_steps or int(self.warmup_ratio * steps)
        if step <= warmup:
            return self.learning_rate * step / warmup
        done = min(1.0, (step - 1 - warmup) / max(1, steps - warmup))
        remaining = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[
            self.schedule
        ]
        floor = 1.0 if self.schedule == "constant" else self.min_ratio
        return self.learning_rate * (floor + (1.0 - floor) * remaining)
