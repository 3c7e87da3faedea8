"""Passes of one model while their rows are computed: their data, losses, gradient buffer and results."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Protocol

import numpy as np
import torch

from tinsmith.engine.base import Pass, PassResult
from tinsmith.engine.custom_loss.process import LossProcess
from tinsmith.engine.lora import adapter
from tinsmith.engine.model import packing
from tinsmith.engine.training.optimizer import GradientBuffer
from tinsmith.engine.training.pass_state import CHECK_INPUTS, PassState
from tinsmith.engine.training.run_rows import RunItem, RunRows, RunScores
from tinsmith.errors import BadRequest


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
        budgets: Mapping[bool, int] | None = None,
        sizes: Mapping[bool, Sequence[int]] | None = None,
    ) -> None:
        """`losses` evaluates uploaded losses; `share` is the part of the rows to compute, by default all. `budgets` are
        packed tokens of a micro-batch of rows with a gradient and of those without, `sizes` the numbers of rows of all
        their micro-batches, where these are planned."""
        self.share = passes[0].share if passes else ""
        self.packing_group = packing_group
        """Only runs of the same group share micro-batches."""
        self.error: Exception | None = None
        """Why the run has failed. Another run of its micro-batch may be the cause."""
        self._share = share or RunRows.of(passes)
        self._items = self._share.items
        self._rows = {
            with_grad: deque(_split(rows, (sizes or {}).get(with_grad) or [len(rows)]))
            for with_grad, rows in self._share.rows.items()
        }
        """The rows of each planned micro-batch; all of them in one where none is planned."""
        self._passes = [PassState(request, losses) for request in passes]
        self._model = model
        self._budgets = budgets or {}
        self._buffer = model.gradient_buffer() if self.next_has_grad else None
        self._is_checked = False
        """Whether the gradient is known to be finite or the run has failed."""

    @property
    def is_over(self) -> bool:
        """Whether no row is left to compute."""
        return self.error is not None or not self.next_rows

    @property
    def next_has_grad(self) -> bool:
        """Whether the next rows have a gradient: these come first."""
        return any(self._rows[True])

    @property
    def budget(self) -> int | None:
        """Packed tokens of the next micro-batch; None for as many as others have."""
        return self._budgets.get(self.next_has_grad)

    @property
    def next_rows(self) -> deque[packing.PackedRow]:
        """The rows of which the next micro-batch is taken, sorted for packing. A row's key is its index among the run's
        data."""
        planned = self._rows[self.next_has_grad]
        while len(planned) > 1 and not planned[0]:
            planned.popleft()
        return planned[0]

    def take_all(self, with_grad: bool) -> deque[packing.PackedRow]:
        """Take all rows with a gradient, or all without, to compute them."""
        rows, self._rows[with_grad] = self._rows[with_grad], deque([deque()])
        return deque(chain(*rows))

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


def _split(rows: Sequence[packing.PackedRow], sizes: Sequence[int]) -> Iterator[deque[packing.PackedRow]]:
    left = iter(rows)
    return (deque(islice(left, size)) for size in sizes)


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
