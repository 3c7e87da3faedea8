"""Virtual optimizer steps of the fake engine, in float64 numpy, group by group.

An adapter is a pair of arrays (A, B); gradients, moments and updates have the same form.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tinsmith.engine.base import Datum, Pass, PassResult, ProbeChange
from tinsmith.engine.fake.model import FakeAdapter
from tinsmith.engine.training.shadow_plan import ShadowPlan, ShadowSettings, shadow_settings, weighted_sum
from tinsmith.errors import BadRequest

Logprobs = Callable[[Datum, FakeAdapter], np.ndarray]
Gradient = Callable[[Sequence[Datum], FakeAdapter], list[np.ndarray]]


@dataclass(frozen=True, slots=True)
class FakeStart:
    """Where virtual steps start; `moments` (first and second of A, then of B) and `steps` of the model's AdamW."""

    weights: FakeAdapter
    moments: Sequence[np.ndarray]
    steps: int


async def shadow_result(request: Pass, start: FakeStart, logprobs: Logprobs, gradient: Gradient) -> PassResult:
    """The request's result; `gradient` is that of -sum w p. Raises BadRequest if a change is not finite."""
    plan, settings = ShadowPlan(request), shadow_settings(request)
    before = [logprobs(probe, start.weights) for probe in plan.probes]
    probe_gradients = [] if settings.exact else [gradient([probe], start.weights) for probe in plan.probes]
    changes: dict[tuple[int, int], ProbeChange] = {}
    for number, step in enumerate(plan.steps):
        await asyncio.sleep(0)  # the API shares this event loop
        update = _update(gradient(step.train, start.weights), settings, start)
        moved = replace(start.weights, a=start.weights.a + update[0], b=start.weights.b + update[1])
        for probe in step.probes:
            post = logprobs(plan.probes[probe], moved) if settings.exact else None
            if post is not None:
                delta = weighted_sum(plan.probes[probe], post - before[probe])
            else:
                delta = -float(sum((u * g).sum() for u, g in zip(update, probe_gradients[probe], strict=True)))
            if not np.isfinite(delta):
                raise BadRequest(f"A shadow delta is {delta}.", "Lower shadow/lr or weights.")
            changes[number, probe] = ProbeChange(
                delta=delta, logprobs_post=None if post is None else post.astype(np.float32)
            )
    trained = [[logprobs(datum, start.weights).astype(np.float32) for datum in step.train] for step in plan.steps]
    return plan.result(trained, [values.astype(np.float32) for values in before], changes)


def _update(grads: Sequence[np.ndarray], settings: ShadowSettings, start: FakeStart) -> list[np.ndarray]:
    """The change of A and B in one step: -lr times the gradient, or AdamW."""
    adam, inherits = settings.adam, settings.optimizer == "adam_inherit"
    if settings.optimizer == "sgd":
        return [-adam.learning_rate * grad for grad in grads]
    norm = float(np.sqrt(sum((grad**2).sum() for grad in grads)))
    clip = min(1.0, adam.grad_clip_norm / (norm + 1e-6)) if adam.grad_clip_norm > 0 else 1.0
    steps = start.steps + 1 if inherits else 1
    updates = []
    for index, (grad, value) in enumerate(zip(grads, (start.weights.a, start.weights.b), strict=True)):
        first, second = start.moments[2 * index : 2 * index + 2] if inherits else (0.0, 0.0)
        mean = adam.beta1 * first + (1 - adam.beta1) * clip * grad
        square = adam.beta2 * second + (1 - adam.beta2) * (clip * grad) ** 2
        scale = np.sqrt(square / (1 - adam.beta2**steps)) + adam.eps
        updates.append(-adam.learning_rate * (mean / (1 - adam.beta1**steps) / scale + adam.weight_decay * value))
    return updates
