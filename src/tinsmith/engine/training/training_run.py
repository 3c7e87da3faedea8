"""Passes of a model on their way through micro-batches: their data, losses, gradient buffer and results."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tinsmith import routed_experts
from tinsmith.engine.base import Pass, PassResult
from tinsmith.engine.custom_loss.process import LossProcess
from tinsmith.engine.lora import adapter
from tinsmith.engine.lora.head.blocks import PackedTargets
from tinsmith.engine.lora.lm_head import ScoreGrads, TargetScores
from tinsmith.engine.model import packing
from tinsmith.engine.training.optimizer import GradientBuffer
from tinsmith.engine.training.pass_state import CHECK_INPUTS, PassState
from tinsmith.engine.training.run_rows import RunItem, RunRows, RunScores
from tinsmith.errors import BadRequest
from tinsmith.routed_experts import RouterShape


class RunModel(Protocol):
    """What a run needs of a model: weights, and a buffer for its gradient."""

    def weights(self) -> adapter.AdapterWeights:
        """The weights that passes read."""
        ...

    def gradient_buffer(self) -> GradientBuffer:
        """A zero buffer for the gradient of a run."""
        ...

    def accept(self, buffer: GradientBuffer | None) -> None:
        """Take the buffer of a run that succeeded; None if its gradient is on other ranks alone."""
        ...

    def discard(self, buffer: GradientBuffer) -> None:
        """Drop the buffer of a run that failed."""
        ...


class TrainingRun:
    """Passes of one model, their rows that are still to compute, and their results.

    Gradients accumulate in a buffer. `accept` adds it to the model; `discard` drops it.
    """

    def __init__(
        self,
        passes: Sequence[Pass],
        model: RunModel,
        losses: LossProcess | None = None,
        packing_group: object = None,
        share: RunRows | None = None,
    ) -> None:
        """`losses` evaluates uploaded losses; `share` is the part of the rows to compute, by default all."""
        self.share = passes[0].share if passes else ""
        self.packing_group = packing_group
        """Only runs of the same group share micro-batches."""
        self.error: Exception | None = None
        """Why the run has failed. Another run of its micro-batch may be the cause."""
        self._share = share or RunRows.of(passes)
        self._items = self._share.items
        self._rows = {with_grad: deque(rows) for with_grad, rows in self._share.rows.items()}
        self._passes = [PassState(request, losses) for request in passes]
        self._model = model
        self._buffer = model.gradient_buffer() if self._rows[True] else None
        self._is_checked = False
        """Whether the gradient is known to be finite or the run has failed."""

    @property
    def is_over(self) -> bool:
        """Whether no row is left to compute."""
        return self.error is not None or not self.next_rows

    @property
    def next_has_grad(self) -> bool:
        """Whether the next rows have a gradient: these come first."""
        return bool(self._rows[True])

    @property
    def next_rows(self) -> deque[packing.PackedRow]:
        """The rows to compute next, sorted for packing. A row's key is its index among the run's data."""
        return self._rows[self.next_has_grad]

    def take_all(self, with_grad: bool) -> deque[packing.PackedRow]:
        """Take all rows with a gradient, or all without, to compute them."""
        rows, self._rows[with_grad] = self._rows[with_grad], deque()
        return rows

    @property
    def weights(self) -> adapter.AdapterWeights:
        """The model's adapter, with this run's gradient buffer if the run has gradients."""
        weights = self._model.weights()
        if self._buffer is None:
            return weights
        return adapter.AdapterWeights(weights.scale, weights.pairs, self._buffer.pairs, weights.stacked_cache)

    def item(self, key: int) -> RunItem:
        """The datum of a row."""
        return self._items[key]

    def state(self, item: RunItem) -> PassState:
        """The pass of a datum."""
        return self._passes[item.pass_index]

    def error_of_rows(self) -> Exception | None:
        """Why the rows have no result; None if they have."""
        check_gradients([self])
        return self.error

    def accept(self) -> None:
        """Add the gradient to the model."""
        if any(item.has_grad for item in self._items):
            if self._buffer is not None:
                self._buffer.complete()
            self._model.accept(self._buffer)

    def results(self) -> list[PassResult]:
        """The results of all passes."""
        return [state.result() for state in self._passes]

    def finish(self) -> list[PassResult]:
        """Add the gradient to the model and return the results. Raises the error of a run that failed."""
        if (error := self.error_of_rows()) is not None:
            raise error
        self.accept()
        return self.results()

    def scores(self) -> RunScores:
        """What this run has computed of its rows."""
        keys = self._share.keys
        placed = [(self._passes[item.pass_index], item.datum_index) for item in map(self.item, keys)]
        empty = np.empty(0, np.float32)
        return RunScores(
            keys=np.array(keys, np.int64),
            logprobs=np.concatenate([empty, *(state.logprobs[index].reshape(-1) for state, index in placed)]),
            entropies=np.concatenate([empty, *(state.entropies[index] for state, index in placed if state.entropies)]),
            metrics=[state.metrics for state in self._passes],
        )

    def merge(self, parts: Sequence[RunScores]) -> None:
        """Take over the scores of the runs that together have all rows, in the order of their shares."""
        for part in parts:
            logprobs, entropies = part.logprobs, part.entropies
            for item in (self.item(int(key)) for key in part.keys):
                state = self._passes[item.pass_index]
                size, length = item.datum.targets.size, len(item.datum.tokens) if state.entropies else 0
                state.logprobs[item.datum_index][...] = logprobs[:size].reshape(item.datum.targets.shape)
                if length:
                    state.entropies[item.datum_index][...] = entropies[:length]
                logprobs, entropies = logprobs[size:], entropies[length:]
        for index, state in enumerate(self._passes):
            of_parts = [part.metrics[index] for part in parts]
            names = {name: None for metrics in of_parts for name in metrics}
            state.metrics = {name: math.fsum(metrics.get(name, 0.0) for metrics in of_parts) for name in names}

    def discard(self) -> None:
        """Leave the model as it was before the run."""
        if self._buffer is not None:
            self._model.discard(self._buffer)


def check_gradients(runs: Sequence[TrainingRun]) -> None:
    """Set the error of runs whose gradient is not finite. A GPU is waited for once, however many runs there are."""
    unchecked = {run: run._buffer for run in runs if run.error is None and run._buffer and not run._is_checked}
    if not unchecked:
        return
    sums = torch.stack([buffer.flat.sum() for buffer in unchecked.values()])
    for run, total in zip(unchecked, sums.tolist(), strict=True):
        run._is_checked = True
        if not math.isfinite(total):
            run.error = BadRequest("The gradient of this request is not finite; it was discarded.", CHECK_INPUTS)


Part = tuple[TrainingRun, Sequence[packing.PackedRow]]
"""Rows of a run in a micro-batch."""


class MicroBatch:
    """Rows of runs, packed, with their adapters and targets."""

    def __init__(self, parts: Sequence[Part], *, with_grad: bool) -> None:
        self.with_grad = with_grad
        rows = [(slot, run, row) for slot, (run, rows) in enumerate(parts) for row in rows]
        self._placed = [(slot, run, run.item(row.key)) for slot, run, row in rows]
        """Slot, run and datum of each row, by the row's key in `tree`."""
        self.tree = packing.pack([replace(row, key=key, adapter=slot) for key, (slot, _, row) in enumerate(rows)])
        self.adapters = adapter.place_adapters(self.tree.spans, [run.weights for run, _ in parts])
        items = {key: self._placed[key][2] for key in self.tree.index}
        at = np.concatenate(
            [np.repeat(index, items[key].targets_per_position) for key, index in self.tree.index.items()]
        )
        ids = np.concatenate([item.datum.targets.reshape(-1) for item in items.values()])
        self.targets = PackedTargets(at, ids)
        """Each row's targets, row after row."""
        grad_mask = np.zeros(len(self.tree.tokens), bool)
        for key, index in self.tree.index.items():
            grad_mask[index[items[key].grad_mask]] = True
        self.grad_mask = grad_mask if with_grad else None
        """bool [T]: packed positions with a target that may have a gradient; None without gradients."""
        self.needs_entropy = any(run.state(item).needs_entropy for _, run, item in self._placed)

    def recorded_experts(self, router: RouterShape) -> np.ndarray | None:
        """The record [T, layers, k] that the pass replays; None if it replays nothing."""
        replayed = {key: item.replayed for key, (_, _, item) in enumerate(self._placed) if item.replayed is not None}
        if not replayed:
            return None
        record = router.empty(len(self.tree.tokens))
        for key, rows in replayed.items():
            record[self.tree.index[key]] = rows
        return record

    @property
    def compares_experts(self) -> bool:
        """Whether any datum has a record, which the result compares with the routers' own choices."""
        return any(item.recorded is not None for _, _, item in self._placed)

    def compare_experts(self, own: np.ndarray) -> None:
        """Add to each pass how often the routers' own choices [T, layers, k] differ from its records."""
        for key, (_, run, item) in enumerate(self._placed):
            if item.recorded is not None:
                share = routed_experts.share_that_differs(own[self.tree.index[key]], item.recorded)
                run.state(item).add_metrics({"expert_mismatch:mean": share})

    def losses(self, scores: TargetScores) -> ScoreGrads:
        """Store the scores, add up the losses and return their gradients, in the order of `scores`.

        Losses are computed on the host, which needs the scores anyway: a GPU is waited for once, and gets the gradients
        in one copy. A run whose loss fails gets its error and no gradient; the others go on.
        """
        index = self.tree.index
        sizes = [self._placed[key][2].datum.targets.size for key in index]
        of_targets, entropies = on_host(scores)
        logprobs = dict(zip(index, of_targets.split(sizes), strict=True))
        grads: dict[int, Tensor] = {}
        entropy_grad = None if entropies is None else torch.zeros_like(entropies)
        by_pass: dict[tuple[int, int], list[int]] = {}
        for key in index:
            slot, _, item = self._placed[key]
            by_pass.setdefault((slot, item.pass_index), []).append(key)
        for _, keys in sorted(by_pass.items()):
            run, items = self._placed[keys[0]][1], [self._placed[key][2] for key in keys]
            at = torch.from_numpy(np.concatenate([index[key] for key in keys]))
            try:
                grad, grad_of_entropy = run.state(items[0]).add(
                    items,
                    torch.cat([logprobs[key] for key in keys]),
                    None if entropies is None else entropies[at],
                )
            except Exception as error:  # noqa: BLE001 - any error of a pass is its run's
                run.error = error
                grads.update((key, torch.zeros_like(logprobs[key])) for key in keys)
                continue
            grads.update(zip(keys, grad.split([item.datum.targets.size for item in items]), strict=True))
            if entropy_grad is not None and grad_of_entropy is not None:
                entropy_grad.index_add_(0, at, grad_of_entropy)  # data that share a position add up
        by_row = torch.cat([grads[key] for key in index])
        return on_device(ScoreGrads(by_row, entropy_grad), scores.logprobs.device)


def on_host(scores: TargetScores) -> tuple[Tensor, Tensor | None]:
    """The logprobs and entropies on the host, in one copy."""
    if scores.entropies is None:
        return scores.logprobs.cpu(), None
    if scores.logprobs.device.type == "cpu":
        return scores.logprobs, scores.entropies
    joined = torch.cat([scores.logprobs, scores.entropies]).cpu()
    return joined[: len(scores.logprobs)], joined[len(scores.logprobs) :]


def on_device(grads: ScoreGrads, device: torch.device) -> ScoreGrads:
    """The gradients on the device, in one copy."""
    if device.type == "cpu":
        return grads
    if grads.entropies is None:
        return ScoreGrads(grads.logprobs.to(device))
    joined = torch.cat([grads.logprobs, grads.entropies]).to(device)
    return ScoreGrads(joined[: len(grads.logprobs)], joined[len(grads.logprobs) :])
