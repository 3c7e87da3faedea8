"""A live model: an adapter in training, its float32 master, gradient and AdamW state, all flat."""

from __future__ import annotations

import math
import weakref
from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tinsmith.engine.base import AdamParams
from tinsmith.engine.lora import adapter, peft
from tinsmith.errors import BadRequest, NotFound

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


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Captured:
    """An adapter at one moment: its layout, float32 master [size], and the reading of it that passes are made with.

    The master's memory is the model's again when nobody reads it: when this is forgotten, and in float32, where the
    reading is the master itself, the reading too.
    """

    layout: adapter.Layout
    master: Tensor
    weights: adapter.Weights


@dataclass(frozen=True, slots=True)
class Gathered:
    """The gradient of a run, float32 [size], and its views by module name."""

    flat: Tensor
    pairs: dict[str, adapter.Pair]


class Model:
    """One model. `master` and `gradient` are float32 [size] in the order of the layout."""

    def __init__(self, layout: adapter.Layout, master: Tensor, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        self.master = torch.nn.Parameter(master)
        self.gradient = torch.zeros_like(master)
        self._gathered = self._gathering(self.gradient)
        self._clean = True
        """Whether the gradient is still zero."""
        self.optimizer = torch.optim.AdamW([self.master], fused=True)
        self._weights: adapter.Weights | None = None
        self._captured: Captured | None = None
        """Of this moment. Others read its master, so the next step must leave that as it is."""
        self._spare: deque[Tensor] = deque(maxlen=1)
        """A master that nobody reads any more: fresh memory of that size takes four times as long to fill."""
        self._reach = Reach(weights=_largest(master))

    def weights(self) -> adapter.Weights:
        """The adapter as of the last step; in float32 it is the master itself."""
        if self._weights is None:
            self._weights = adapter.weights_of(self.layout, self.master.detach(), self.dtype)
        return self._weights

    def capture(self) -> Captured:
        """The adapter of this moment for good, without a copy: the next step works on one."""
        if self._captured is None:
            self._captured = Captured(self.layout, self.master.detach(), self.weights())
        return self._captured

    def gathering(self) -> Gathered:
        """Zeros to gather a run's gradient in: the model's own gradient while nothing is in it.

        Fresh memory for 64 small models takes longer to clear than their gradients take to compute.
        """
        return self._gathered if self._clean else self._gathering(torch.zeros_like(self.gradient))

    def take(self, gathered: Gathered) -> None:
        """A run went well: what it gathered is the model's."""
        if gathered is not self._gathered:
            self.gradient.add_(gathered.flat)
        self._clean = False

    def refuse(self, gathered: Gathered) -> None:
        """A run did not go well: as if it had not been."""
        if gathered is self._gathered:
            gathered.flat.zero_()

    def _gathering(self, flat: Tensor) -> Gathered:
        return Gathered(flat, self.layout.pairs(flat))

    def step(self, adam: AdamParams) -> dict[str, float]:
        """AdamW with decoupled decay, then a clean gradient. Returns the gradient's norm before clipping.

        Raises BadRequest for a step that would overflow; the model is then as it was.
        """
        norm = self._norm()
        self._leave_captured()
        self.master.grad = self.gradient
        reach = self._reach.after(adam, norm, self._steps() + 1)
        if reach.safe:
            self._update(adam, norm)
        else:
            reach = replace(reach, weights=self._tried(adam, norm))
        self._reach = reach
        if not self._clean:
            self.gradient.zero_()
            self._clean = True
        self._weights = None
        self.weights()  # now, so that a capture takes no time; the next pass wants it anyway
        return {"grad_norm": norm}

    def _norm(self) -> float:
        """The gradient's. Raises BadRequest if AdamW could not square it."""
        norm = 0.0 if self._clean else float(torch.nn.utils.get_total_norm([self.gradient]))
        if not norm < STEEPEST:
            raise BadRequest(
                f"The gradient's norm is {norm:g}: its squares overflow, so there is no step.",
                "Load a saved state, and lower weights or advantages: gradients add up until a step.",
            )
        return norm

    def _update(self, adam: AdamParams, norm: float) -> None:
        """The step itself; a gradient whose norm is above `grad_clip_norm` is first cut to it, if that is not 0."""
        if adam.grad_clip_norm > 0 and not self._clean:
            torch.nn.utils.clip_grads_with_norm_([self.master], adam.grad_clip_norm, self.gradient.new_tensor(norm))
        self.optimizer.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        self.optimizer.step()

    def _tried(self, adam: AdamParams, norm: float) -> float:
        """The same where it may overflow: taken back if it did. Returns the largest weight."""
        moments = self.moments()
        kept = replace(moments, average=moments.average.clone(), square=moments.square.clone())
        master, gradient = self.master.detach().clone(), self.gradient.clone()
        self._update(adam, norm)
        largest = _largest(self.master.detach())
        if not largest < LIMIT:
            self.master.data.copy_(master)
            self.gradient.copy_(gradient)
            self.restore(kept)
            raise BadRequest(
                f"A step with learning_rate {adam.learning_rate:g}, eps {adam.eps:g} and weight_decay "
                f"{adam.weight_decay:g} would make a weight {largest:g}; the gradient's norm is {norm:g}.",
                "Nothing was changed: lower learning_rate or weight_decay, or raise eps.",
            )
        return largest

    def _steps(self) -> int:
        """Taken so far, as AdamW counts them."""
        return int(self.optimizer.state[self.master]["step"]) if self.master in self.optimizer.state else 0

    def _leave_captured(self) -> None:
        """Go on in memory that no captured version reads."""
        if self._captured is None:
            return
        left = self.master.data
        self.master.data = (self._spare.pop() if self._spare else torch.empty_like(left)).copy_(left)
        reader = self._captured.weights if self.dtype == torch.float32 else self._captured
        weakref.finalize(reader, self._spare.append, left)
        self._captured = None

    def moments(self) -> peft.Moments:
        """AdamW's state, zeros before the first step."""
        state = self.optimizer.state.get(self.master, {})
        if not state:
            return peft.Moments(torch.zeros_like(self.gradient), torch.zeros_like(self.gradient), 0)
        return peft.Moments(state["exp_avg"], state["exp_avg_sq"], int(state["step"]))

    def restore(self, moments: peft.Moments) -> None:
        """Go on from saved moments. Raises NotFound if they are not finite."""
        slopes, squares = _largest(moments.average), _largest(moments.square)
        if not math.isfinite(slopes + squares):
            raise NotFound("The saved optimizer state holds numbers that are not finite.", "Load it without it.")
        self._reach = replace(self._reach, slopes=slopes)
        self.optimizer.state[self.master] = {
            "step": torch.tensor(float(moments.steps), device=self.master.device),
            "exp_avg": moments.average.to(self.master.device),
            "exp_avg_sq": moments.square.to(self.master.device),
        }


def _largest(flat: Tensor) -> float:
    """Of the numbers' sizes; NaN if one is."""
    low, high = torch.aminmax(flat)
    return float(torch.maximum(-low, high))
