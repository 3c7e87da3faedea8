"""The micro-batches of a rank whose base model is sharded over all ranks, which compute each layer together.

All ranks compute the same number of micro-batches, first those with a gradient and then those without; a rank that has
fewer computes empty ones, so that the others get its slices. So all micro-batches of a call are planned before the
first one is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from tinsmith.engine.base import PassResult
from tinsmith.engine.model import packing
from tinsmith.engine.training.exchange import Exchange
from tinsmith.engine.training.micro_batches.batch import Part
from tinsmith.engine.training.micro_batches.runner import MicroBatchRunner
from tinsmith.engine.training.training_run import TrainingRun


class LockstepQueue:
    """Computes runs as `MicroBatchQueue` does."""

    def __init__(
        self, runner: MicroBatchRunner, turn: Callable[[], AbstractAsyncContextManager[None]], exchange: Exchange
    ) -> None:
        self._runner, self._turn, self._exchange = runner, turn, exchange

    async def run(self, runs: Sequence[TrainingRun]) -> list[list[PassResult]]:
        """Compute all rows of some runs and finish them."""
        await self.compute(runs)
        return [run.finish() for run in runs]

    async def compute(self, runs: Sequence[TrainingRun]) -> None:
        """Compute all rows of some runs, on all ranks together. A run that fails has an `error`."""
        plans = {with_grad: self._plan(runs, with_grad) for with_grad in (True, False)}
        counts = await self._exchange.largest([len(plan) for plan in plans.values()])
        for (with_grad, plan), count in zip(plans.items(), counts, strict=True):
            for index in range(count):
                async with self._turn():
                    with self._exchange.ending():
                        self._compute(plan[index] if index < len(plan) else (), with_grad)

    def _compute(self, parts: Sequence[Part], with_grad: bool) -> None:
        """Compute a micro-batch, an empty one without parts. Raises its error."""
        if not parts:
            self._runner.compute_nothing(with_grad)
            return
        running = self._runner.start(parts, with_grad)
        while not running.is_done:
            self._runner.advance([running])
        if running.error is not None:
            raise running.error

    def _plan(self, runs: Sequence[TrainingRun], with_grad: bool) -> list[list[Part]]:
        """The parts of each micro-batch."""
        plan: list[list[Part]] = []
        left = [(run, rows) for run in runs if (rows := run.take_all(with_grad))]
        while left:
            group, used, parts = left[0][0].packing_group, 0, list[Part]()
            for run, rows in left:
                if run.packing_group is group:
                    taken, used = packing.take_rows(rows, self._runner.tokens, used)
                    if taken:
                        parts.append((run, taken))
            plan.append(parts)
            left = [(run, rows) for run, rows in left if rows]
        return plan
