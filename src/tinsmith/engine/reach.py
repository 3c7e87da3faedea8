"""How large an AdamW step can make an adapter's numbers: bounds that cost nothing, so that few steps must be looked at.

To read all weights after a step takes a third of its time, and to keep what was before, for a step to be taken back,
more than the step itself. But a weight moves by rate |m| / (sqrt(v) + eps) at most, and the mean m of past gradients is
at most as large as the largest of these. Only a step that might overflow by this measure is taken with care (`live`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.engine.base import AdamParams

LIMIT = 1e38
"""Of a weight: in float32, and rounded to bfloat16, it is finite."""
STEEPEST = 1e19
"""Of a gradient's norm: the squares of what is less are finite in float32."""
_SMALLEST = 1e-300
"""Stands for 0 where something is divided by it."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Nothing of a model is larger: of its weights, and of the means of its gradients."""

    weights: float
    slopes: float = 0.0

    @property
    def safe(self) -> bool:
        """Whether all is finite for sure."""
        return self.weights < LIMIT

    def after(self, adam: AdamParams, norm: float, steps: int) -> Reach:
        """After the step of this number, with a gradient of this norm; factors below 1 count as 1, so that what is
        computed on the way is within the bound too."""
        slopes = max(self.slopes, norm)
        rate = adam.learning_rate / (1 - adam.beta1**steps)
        moved = max(1.0, rate) * max(1.0, slopes) / min(1.0, max(adam.eps, _SMALLEST))
        kept = max(1.0, abs(1 - adam.learning_rate * adam.weight_decay))
        return Reach(self.weights * kept + moved, slopes)
