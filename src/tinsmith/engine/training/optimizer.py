"""A trainable adapter: float32 master weights, accumulated gradient and AdamW state, each one flat tensor.

Also the bounds that show when an AdamW step cannot overflow. Reading all weights after a step would take a third of
the step's time, and copying them for a rollback more than the step itself. A weight moves by at most rate |m| /
(sqrt(v) + eps), and the mean m of the gradients is at most the largest of them, so a bound on both is updated for
free. Only a step that may overflow by this bound is checked and, if it did overflow, reverted.
"""

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

MAX_WEIGHT = 1e38
"""A weight below this is finite in float32 and when rounded to bfloat16."""
MAX_GRAD_NORM = 1e19
"""The squares of gradients below this norm are finite in float32."""
_TINY = 1e-300
"""Replaces a divisor of 0."""


@dataclass(frozen=True, slots=True)
class UpdateBound:
    """Upper bounds of an adapter's weights and of the means of its gradients."""

    weights: float
    gradients: float = 0.0

    @property
    def safe(self) -> bool:
        """Whether every weight is known to be finite."""
        return self.weights < MAX_WEIGHT

    def after(self, adam: AdamParams, norm: float, steps: int) -> UpdateBound:
        """The bounds after step number `steps` with a gradient of this norm.

        Factors below 1 count as 1, so that intermediate results are bounded too.
        """
        gradients = max(self.gradients, norm)
        rate = adam.learning_rate / (1 - adam.beta1**steps)
        moved = max(1.0, rate) * max(1.0, gradients) / min(1.0, max(adam.eps, _TINY))
        decay = max(1.0, abs(1 - adam.learning_rate * adam.weight_decay))
        return UpdateBound(self.weights * decay + moved, gradients)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class AdapterSnapshot:
    """An adapter at one moment: layout, float32 master [size], and the weights that passes read.

    The model reuses the master's memory once nothing refers to it: when the snapshot is garbage, and in float32, where
    the weights are views of the master, when the weights are garbage too.
    """

    layout: adapter.AdapterLayout
    master: Tensor
    weights: adapter.AdapterWeights


@dataclass(frozen=True, slots=True)
class GradientBuffer:
    """The gradient of a run, float32 [size], and views of it by module name."""

    flat: Tensor
    pairs: dict[str, adapter.LoraPair]
    factors: dict[str, float]
    """As of the layout."""

    @classmethod
    def over(cls, layout: adapter.AdapterLayout, flat: Tensor) -> GradientBuffer:
        """A buffer in the memory of `flat`."""
        return cls(flat, layout.pairs(flat), layout.factors)

    def complete(self) -> None:
        """Turn the gradient of the weights that passes read into that of the master; once, after the last pass."""
        for name, factor in self.factors.items():
            self.pairs[name].b.mul_(factor)


class TrainableAdapter:
    """An adapter in training. `master` and `gradient` are float32 [size] in the order of the layout."""

    def __init__(self, layout: adapter.AdapterLayout, master: Tensor, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        self.master = torch.nn.Parameter(master)
        self.gradient = torch.zeros_like(master)
        self._own_buffer = self._buffer_over(self.gradient)
        self._is_lent = False
        """Whether a run in progress has `_own_buffer`."""
        self.has_gradient = False
        """Whether a run since the last step had a gradient."""
        self._shards: dict[int, GradientShard] = {}
        self.optimizer = torch.optim.AdamW([self.master], fused=True)
        self._weights: adapter.AdapterWeights | None = None
        self._snapshot: AdapterSnapshot | None = None
        """The snapshot of the current weights. It refers to `master`, so the next step must not write into that."""
        self._spare: deque[Tensor] = deque(maxlen=1)
        """A master that nothing refers to any more; filling newly allocated memory takes four times as long."""
        self._bound = UpdateBound(weights=_max_abs(master))
        self._borrows_master = False
        """Whether `master` is the memory of another adapter, of which this one is a fork."""

    def weights(self) -> adapter.AdapterWeights:
        """The weights as of the last step; in float32 they are views of the master."""
        if self._weights is None:
            self._weights = adapter.adapter_weights(self.layout, self.master.detach(), self.dtype)
        return self._weights

    def capture(self) -> AdapterSnapshot:
        """An immutable snapshot, without a copy: the next step writes into other memory."""
        if self._snapshot is None:
            self._snapshot = AdapterSnapshot(self.layout, self.master.detach(), self.weights())
        return self._snapshot

    def fork(self) -> TrainableAdapter:
        """Another adapter with the same weights, in the same memory until one of the two takes a step."""
        snapshot = self.capture()
        fork = TrainableAdapter(self.layout, snapshot.master, self.dtype)
        fork._weights, fork._snapshot, fork._borrows_master = snapshot.weights, snapshot, True
        return fork

    def gradient_buffer(self) -> GradientBuffer:
        """A zero buffer for the gradient of a run: the model's own gradient if that is still zero and no other run has
        it.

        For 64 small models, clearing new memory takes longer than computing their gradients.
        """
        if self.has_gradient or self._is_lent:
            return self.new_buffer()
        self._is_lent = True
        return self._own_buffer

    def accept(self, buffer: GradientBuffer | None) -> None:
        """Add the buffer of a run that succeeded to the gradient; None if other ranks have the run's gradient."""
        if buffer is self._own_buffer:
            self._is_lent = False
        elif buffer is not None:
            self.gradient.add_(buffer.flat)
        self.has_gradient = True

    def discard(self, buffer: GradientBuffer) -> None:
        """Restore the gradient after a run that failed."""
        if buffer is self._own_buffer:
            buffer.flat.zero_()
            self._is_lent = False

    def shard(self, index: int) -> TrainableAdapter | GradientShard:
        """The model of runs of one of this rank's shards of rows; this adapter itself is the first."""
        return self._shards.setdefault(index, GradientShard(self)) if index else self

    def take_shards(self, count: int) -> list[Tensor | None]:
        """The gradients of `count` shards, the first in `gradient` itself; those of further shards are then zero."""
        further = [self._shards.pop(index, None) for index in range(1, count)]
        return [self.gradient, *(shard.gradient if shard is not None else None for shard in further)]

    def new_buffer(self) -> GradientBuffer:
        """A zero buffer in new memory."""
        return self._buffer_over(torch.zeros_like(self.gradient))

    def _buffer_over(self, flat: Tensor) -> GradientBuffer:
        return GradientBuffer.over(self.layout, flat)

    def step(self, adam: AdamParams) -> dict[str, float]:
        """Take an AdamW step with decoupled decay and clear the gradient; returns its norm before clipping.

        Raises BadRequest for a step that would overflow; the model is then unchanged.
        """
        norm = self._grad_norm()
        self._release_snapshot()
        self.master.grad = self.gradient
        bound = self._bound.after(adam, norm, self.steps + 1)
        if bound.safe:
            self._update(adam, norm)
        else:
            bound = replace(bound, weights=self._update_or_revert(adam, norm))
        self._bound = bound
        if self.has_gradient:
            self.gradient.zero_()
            self.has_gradient = False
        self._weights = None
        self.weights()  # made now, so that a capture takes no time; the next pass needs it anyway
        return {"grad_norm": norm}

    def _grad_norm(self) -> float:
        """The gradient's norm. Raises BadRequest if AdamW's squares of the gradient would overflow."""
        norm = float(torch.nn.utils.get_total_norm([self.gradient])) if self.has_gradient else 0.0
        if not norm < MAX_GRAD_NORM:
            raise BadRequest(
                f"The gradient's norm is {norm:g}: its squares overflow, so no step is taken.",
                "Load a saved state and lower weights or advantages: gradients add up until a step.",
            )
        return norm

    def _update(self, adam: AdamParams, norm: float) -> None:
        """Clip the gradient to `grad_clip_norm` (0: no clipping) and take the optimizer's step."""
        if adam.grad_clip_norm > 0 and self.has_gradient:
            torch.nn.utils.clip_grads_with_norm_([self.master], adam.grad_clip_norm, self.gradient.new_tensor(norm))
        self.optimizer.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        self.optimizer.step()

    def _update_or_revert(self, adam: AdamParams, norm: float) -> float:
        """Take a step that may overflow, and revert it if it did. Returns the largest absolute weight."""
        moments = self.moments()
        saved = replace(moments, exp_avg=moments.exp_avg.clone(), exp_avg_sq=moments.exp_avg_sq.clone())
        master, gradient = self.master.detach().clone(), self.gradient.clone()
        self._update(adam, norm)
        largest = _max_abs(self.master.detach())
        if not largest < MAX_WEIGHT:
            self.master.data.copy_(master)
            self.gradient.copy_(gradient)
            self.restore(saved)
            raise BadRequest(
                f"A step with learning_rate {adam.learning_rate:g}, eps {adam.eps:g} and weight_decay "
                f"{adam.weight_decay:g} would make a weight {largest:g}; the gradient's norm is {norm:g}.",
                "The model is unchanged: lower learning_rate or weight_decay, or raise eps.",
            )
        return largest

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return int(self.optimizer.state[self.master]["step"]) if self.master in self.optimizer.state else 0

    def _release_snapshot(self) -> None:
        """Continue in memory that no snapshot refers to."""
        if self._snapshot is None:
            return
        previous = self.master.data
        self.master.data = (self._spare.pop() if self._spare else torch.empty_like(previous)).copy_(previous)
        if not self._borrows_master:
            reader = self._snapshot.weights if self.dtype == torch.float32 else self._snapshot
            weakref.finalize(reader, self._spare.append, previous)
        self._snapshot, self._borrows_master = None, False

    def moments(self) -> peft.Moments:
        """AdamW's state; zeros before the first step."""
        state = self.optimizer.state.get(self.master, {})
        if not state:
            return peft.Moments(torch.zeros_like(self.gradient), torch.zeros_like(self.gradient), 0)
        return peft.Moments(state["exp_avg"], state["exp_avg_sq"], int(state["step"]))

    def restore(self, moments: peft.Moments) -> None:
        """Continue from saved moments. Raises NotFound if they are not finite."""
        largest, largest_sq = _max_abs(moments.exp_avg), _max_abs(moments.exp_avg_sq)
        if not math.isfinite(largest + largest_sq):
            raise NotFound("The saved optimizer state holds values that are not finite.", "Load it without optimizer.")
        self._bound = replace(self._bound, gradients=largest)
        self.optimizer.state[self.master] = {
            "step": torch.tensor(float(moments.steps), device=self.master.device),
            "exp_avg": moments.exp_avg.to(self.master.device),
            "exp_avg_sq": moments.exp_avg_sq.to(self.master.device),
        }


class GradientShard:
    """The gradient of the rows of a further shard of an adapter, apart until the next step; a model of runs."""

    def __init__(self, adapter: TrainableAdapter) -> None:
        self._adapter = adapter
        self.gradient: Tensor | None = None
        """float32 [size]; None for zero."""

    def weights(self) -> adapter.AdapterWeights:
        return self._adapter.weights()

    def gradient_buffer(self) -> GradientBuffer:
        return self._adapter.new_buffer()

    def accept(self, buffer: GradientBuffer | None) -> None:
        if buffer is not None:
            self.gradient = buffer.flat if self.gradient is None else self.gradient.add_(buffer.flat)

    def discard(self, buffer: GradientBuffer) -> None:
        """Nothing refers to the buffer any more."""


def _max_abs(flat: Tensor) -> float:
    """The largest absolute value; NaN if any value is NaN."""
    low, high = torch.aminmax(flat)
    return float(torch.maximum(-low, high))
