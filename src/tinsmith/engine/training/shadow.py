"""Virtual optimizer steps in PyTorch: how logprobs of probes would change after a step on some data.

The steps start from one adapter, which is only read. Some steps at a time share micro-batches, as several models do:
each is a slot, which is a row of scratch memory that holds the step's gradient, then its update, then (in mode exact)
its updated weights. The memory is freed at the end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import Datum, Pass, PassResult, ProbeChange
from tinsmith.engine.lora import adapter, peft
from tinsmith.engine.training import shadow_differences
from tinsmith.engine.training.optimizer import AdapterSnapshot, GradientBuffer
from tinsmith.engine.training.run_rows import RunRows
from tinsmith.engine.training.shadow_plan import (
    ShadowPlan,
    ShadowSettings,
    cross_entropy_pass,
    shadow_settings,
    weighted_sum,
)
from tinsmith.engine.training.training_run import TrainingRun
from tinsmith.errors import BadRequest

SCRATCH_BYTES = 2**29
"""Limit of a scratch tensor, of which a request has at most two; a single adapter may be larger."""
MAX_SLOTS = 32
"""Virtual steps computed together, at most."""
_DOT_COLUMNS = 2**16
"""Columns of an inner product that are added up in float32; their sums are added in float64."""
_Member = TypeVar("_Member")
_OVERFLOW = "Lower shadow/lr, weights or shadow/weight_decay, or raise shadow/eps."


@dataclass(frozen=True, slots=True)
class ShadowStart:
    """Where virtual steps start: an adapter, and AdamW's state for `adam_inherit`."""

    snapshot: AdapterSnapshot
    moments: peft.Moments | None


@dataclass(frozen=True, slots=True)
class Background:
    """How a shadow run computes while the trainer serves others."""

    compute: Callable[[Sequence[TrainingRun]], Awaitable[list[list[PassResult]]]]
    turn: Callable[[], AbstractAsyncContextManager[None]]
    dtype: torch.dtype
    original_context: int
    """As in the base's card."""


class _Slot:
    """A virtual step in `flat`, float32 [size]. A model of a TrainingRun."""

    def __init__(self, start: ShadowStart, flat: Tensor) -> None:
        self._start, self.flat = start, flat
        self._buffer = GradientBuffer.over(start.snapshot.layout, flat)
        self._weights = start.snapshot.weights

    def weights(self) -> adapter.AdapterWeights:
        return self._weights

    def gradient_buffer(self) -> GradientBuffer:
        return self._buffer

    def accept(self, buffer: GradientBuffer | None) -> None:
        """The gradient stays in the slot."""

    def discard(self, buffer: GradientBuffer) -> None:
        """The run has failed, and its slots are not used again."""

    def clear(self) -> None:
        """Take the start's weights and a gradient of zero."""
        self.flat.zero_()
        self._weights = self._start.snapshot.weights

    def shift(self, direction: Tensor, distance: float) -> None:
        """Take the start's weights plus `distance` times a direction. For passes in float32."""
        snapshot = self._start.snapshot
        torch.add(snapshot.master, direction, alpha=distance, out=self.flat)
        self._weights = adapter.adapter_weights(snapshot.layout, self.flat, torch.float32)

    def move(self, dtype: torch.dtype) -> None:
        """Replace the update in `flat` by the updated weights, and read those."""
        snapshot = self._start.snapshot
        self._weights = adapter.adapter_weights(snapshot.layout, self.flat.add_(snapshot.master), dtype)


class ShadowRun:
    """One request of loss_fn `shadow`."""

    def __init__(self, request: Pass, start: ShadowStart, background: Background) -> None:
        self._settings, self._plan = shadow_settings(request), ShadowPlan(request)
        self._start, self._background, self._share = start, background, request.share
        self._trained: list[Sequence[np.ndarray]] = [()] * len(self._plan.steps)
        self._changes: dict[tuple[int, int], ProbeChange] = {}

    async def run(self) -> PassResult:
        """The request's result. Raises BadRequest if a gradient or a logprob is not finite."""
        before = await (self._exact() if self._settings.exact else self._first_order())
        return self._plan.result(self._trained, before, self._changes)

    async def _exact(self) -> Sequence[np.ndarray]:
        """Compare the probes' logprobs before and after each step; returns those before."""
        plan = self._plan
        slots = self._slots(len(plan.steps))
        slots[0].clear()
        [before] = await self._logprobs(slots[:1], [plan.probes])
        for numbers in _chunks(plan, range(len(plan.steps)), len(slots)):
            used = slots[: len(numbers)]
            await self._updates(used, numbers)
            async with self._background.turn():
                for slot in used:
                    slot.move(self._background.dtype)
            probes = [[plan.probes[probe] for probe in plan.steps[number].probes] for number in numbers]
            try:
                after = await self._logprobs(used, probes)
            except BadRequest as error:
                raise BadRequest("The logprobs after a virtual step are not finite.", _OVERFLOW) from error
            for number, logprobs in zip(numbers, after, strict=True):
                for probe, post in zip(plan.steps[number].probes, logprobs, strict=True):
                    gap = post.astype(np.float64) - before[probe]
                    delta = weighted_sum(plan.probes[probe], gap)
                    self._changes[number, probe] = ProbeChange(delta=delta, logprobs_post=post)
        return before

    async def _first_order(self) -> list[np.ndarray]:
        """Multiply each step's update by the gradient of its probes; returns the probes' logprobs.

        Where forward passes are cheaper, the products are differences of these. Probes are held in blocks; a step whose
        probes are in several blocks is computed for each.
        """
        plan, before = self._plan, []
        by_differences = self._background.dtype == torch.float32 and shadow_differences.pays_off(self._settings, plan)
        slots = self._slots(2 * len(plan.probes) if by_differences else len(plan.steps))
        probe_slots = self._slots(len(plan.probes))
        if by_differences:
            await self._score_train_data(slots[0])
        for block in _cut(range(len(plan.probes)), len(probe_slots)):
            held = probe_slots[: len(block)]
            before += [
                logprobs for [logprobs] in await self._gradients(held, [[plan.probes[probe]] for probe in block])
            ]
            wanted = {probe: row for row, probe in enumerate(block)}
            if by_differences:
                left = await self._differences(slots, dict(zip(block, held, strict=True)))
                wanted = {probe: row for probe, row in wanted.items() if probe in left}
            steps = [number for number, step in enumerate(plan.steps) if not wanted.keys().isdisjoint(step.probes)]
            for numbers in _chunks(plan, steps, len(slots)):
                await self._updates(slots[: len(numbers)], numbers)
                async with self._background.turn():
                    deltas = _minus_dots(slots[: len(numbers)], held)
                for number, row in zip(numbers, deltas, strict=True):
                    for probe in wanted.keys() & plan.steps[number].probes:
                        self._changes[number, probe] = ProbeChange(delta=_finite(row[wanted[probe]]))
        return before

    async def _score_train_data(self, slot: _Slot) -> None:
        """Set the logprobs of all train data at the start."""
        slot.clear()
        [logprobs] = await self._logprobs([slot], [[datum for step in self._plan.steps for datum in step.train]])
        remaining = iter(logprobs)
        self._trained = [[next(remaining) for _ in step.train] for step in self._plan.steps]

    async def _differences(self, slots: Sequence[_Slot], held: Mapping[int, _Slot]) -> set[int]:
        """Set the changes of probes, whose gradients are held, by differences of forward passes.

        Returns the probes for which that is not accurate.
        """
        plan, rate = self._plan, self._settings.adam.learning_rate
        async with self._background.turn():
            norms = [float(torch.linalg.vector_norm(slot.flat)) for slot in held.values()]
        distances = shadow_differences.first_distances([plan.probes[probe] for probe in held], norms)
        waiting = {probe: distance for probe, distance in zip(held, distances, strict=True) if distance > 0}
        left = set(held)
        for _ in range(shadow_differences.ATTEMPTS):
            if not waiting:
                break
            try:
                ends = await self._ends(slots, held, waiting)
            except BadRequest:  # too far: the logprobs there are not finite
                break
            again = {}
            for probe, (low, high) in ends.items():
                difference = shadow_differences.Difference(plan, plan.steps_with(probe), low, high)
                if not difference.accurate:
                    again[probe] = waiting[probe] * difference.correction
                    continue
                for number, change in difference.changes(rate / waiting[probe]).items():
                    self._changes[number, probe] = ProbeChange(delta=_finite(change))
                left.remove(probe)
            waiting = again
        return left

    async def _ends(
        self, slots: Sequence[_Slot], held: Mapping[int, _Slot], distances: Mapping[int, float]
    ) -> dict[int, list[Sequence[np.ndarray]]]:
        """The logprobs of each probe's train data at both ends: at the start minus and plus the distance times the
        gradient of sum w p of the probe.
        """
        plan = self._plan
        ends: dict[int, list[Sequence[np.ndarray]]] = {probe: [] for probe in distances}
        for some in _cut([(probe, sign) for probe in distances for sign in (-1, 1)], len(slots)):
            used = slots[: len(some)]
            async with self._background.turn():
                for slot, (probe, sign) in zip(used, some, strict=True):
                    slot.shift(held[probe].flat, -sign * distances[probe])  # held is the gradient of -sum w p
            data = [[datum for n in plan.steps_with(probe) for datum in plan.steps[n].train] for probe, _ in some]
            for (probe, _), logprobs in zip(some, await self._logprobs(used, data), strict=True):
                ends[probe].append(logprobs)
        return ends

    async def _updates(self, slots: Sequence[_Slot], numbers: Sequence[int]) -> None:
        """Leave the update of each step in its slot."""
        logprobs = await self._gradients(slots, [self._plan.steps[number].train for number in numbers])
        for number, of_step in zip(numbers, logprobs, strict=True):
            self._trained[number] = of_step
        async with self._background.turn():
            for slot in slots:
                to_update(slot.flat, self._settings, self._start)

    async def _gradients(self, slots: Sequence[_Slot], data: Sequence[Sequence[Datum]]) -> list[Sequence[np.ndarray]]:
        """Leave the gradient of each slot's data in the slot; returns the logprobs."""
        for slot in slots:
            slot.clear()
        return await self._compute(slots, data, forward_only=False)

    async def _logprobs(self, slots: Sequence[_Slot], data: Sequence[Sequence[Datum]]) -> list[Sequence[np.ndarray]]:
        """The logprobs of each slot's data under the slot's weights."""
        return await self._compute(slots, data, forward_only=True)

    async def _compute(
        self, slots: Sequence[_Slot], data: Sequence[Sequence[Datum]], *, forward_only: bool
    ) -> list[Sequence[np.ndarray]]:
        runs = []
        for slot, rows in zip(slots, data, strict=True):
            passes = [self._pass(rows, forward_only)]
            share = RunRows.of(passes, original_context=self._background.original_context)
            runs.append(TrainingRun(passes, slot, packing_group=self, share=share))
        return [result.logprobs for [result] in await self._background.compute(runs)]

    def _pass(self, data: Sequence[Datum], forward_only: bool) -> Pass:
        return replace(cross_entropy_pass("", data, forward_only=forward_only), share=self._share)

    def _slots(self, wanted: int) -> list[_Slot]:
        """Slots for up to `wanted` steps, in one new scratch tensor within the limit."""
        snapshot = self._start.snapshot
        fit = max(1, SCRATCH_BYTES // (4 * snapshot.layout.size))
        scratch = torch.empty(min(wanted, fit, MAX_SLOTS), snapshot.layout.size, device=snapshot.master.device)
        return [_Slot(self._start, flat) for flat in scratch]


def to_update(flat: Tensor, settings: ShadowSettings, start: ShadowStart) -> None:
    """Replace a gradient by the change of the weights in one step: torch's AdamW, or -lr times the gradient."""
    adam, master = settings.adam, start.snapshot.master
    if settings.optimizer == "sgd":
        flat.mul_(-adam.learning_rate)
        return
    if adam.grad_clip_norm > 0:
        norm = float(torch.linalg.vector_norm(flat))
        flat.mul_(min(1.0, adam.grad_clip_norm / (norm + 1e-6)))
    if start.moments is None:  # the first step: m / (1 - beta1) = g and sqrt(v / (1 - beta2)) = |g|
        flat.div_(flat.abs().add_(adam.eps))
    else:
        steps = start.moments.steps + 1
        variance = flat.square().mul_(1 - adam.beta2).add_(start.moments.exp_avg_sq, alpha=adam.beta2)
        scale = variance.div_(1 - adam.beta2**steps).sqrt_().add_(adam.eps)
        flat.mul_(1 - adam.beta1).add_(start.moments.exp_avg, alpha=adam.beta1)
        flat.div_(1 - adam.beta1**steps).div_(scale)
    flat.mul_(-adam.learning_rate)
    if adam.weight_decay:
        flat.sub_(master, alpha=adam.learning_rate * adam.weight_decay)


def _chunks(plan: ShadowPlan, numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Steps to compute together; neighbours have similar lengths, so that their adapters are batched."""
    return _cut(sorted(numbers, key=lambda number: plan.steps[number].tokens), size)


def _cut(listed: Sequence[_Member], size: int) -> Iterator[Sequence[_Member]]:
    return (listed[start : start + size] for start in range(0, len(listed), size))


def _minus_dots(updates: Sequence[_Slot], gradients: Sequence[_Slot]) -> np.ndarray:
    """-<u, g> of each update and gradient, float64 [updates, gradients].

    The gradients are those of -sum w p, so this is the change of sum w p to first order.
    """
    total = np.zeros((len(updates), len(gradients)))
    left, right = torch.stack([slot.flat for slot in updates]), torch.stack([slot.flat for slot in gradients])
    for u, g in zip(left.split(_DOT_COLUMNS, dim=1), right.split(_DOT_COLUMNS, dim=1), strict=True):
        total -= (u @ g.T).double().cpu().numpy()
    return total


def _finite(delta: float) -> float:
    if not np.isfinite(delta):
        raise BadRequest(f"A shadow delta is {delta}.", _OVERFLOW)
    return float(delta)
