"""The training runs in progress, whose rows share micro-batches, and the order in which they are computed.

Before each micro-batch, the share that was served least leads; the others fill what it leaves free. A share is an
opaque name (the service gives the tenant's), and is served by packed tokens: start-time fair queueing. So a small run
waits for at most one micro-batch of each other share, however many tokens these have waiting. Runs of one share take
turns. A micro-batch that is computed in pieces is of one run, and others may come between its pieces.

Where the runner computes several micro-batches at the same time, the next is of the runs that are in none yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from tinsmith.engine.base import PassResult
from tinsmith.engine.model import packing
from tinsmith.engine.training.micro_batches.batch import Part
from tinsmith.engine.training.micro_batches.runner import MicroBatchRunner, RunningMicroBatch
from tinsmith.engine.training.training_run import TrainingRun

PRUNED_SHARES = 1024
"""Number of shares above which those are dropped that are served as much as a new one."""


class FairClock:
    """Tokens served by share, counted from the service of the share that led last.

    A share that was idle starts where the others are, less `credit` tokens: a pause between two of its requests does
    not cost it its turn, and a longer pause earns no more.
    """

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._served: dict[str, int] = {}
        self._now = 0

    def enter(self, share: str) -> None:
        """Note that the share has a run."""
        if len(self._served) > PRUNED_SHARES:
            self._served = {name: served for name, served in self._served.items() if served > self._earliest()}
        self._served[share] = max(self.served(share), self._earliest())

    def served(self, share: str) -> int:
        """Tokens served to the share. The share with the fewest leads."""
        return self._served.get(share, self._earliest())

    def lead(self, share: str) -> None:
        """Note that the share leads a micro-batch."""
        self._now = max(self._now, self.served(share))

    def charge(self, share: str, tokens: int) -> None:
        """Note that these tokens of the share were computed."""
        self._served[share] = self.served(share) + tokens

    def _earliest(self) -> int:
        return self._now - self._credit


class MicroBatchQueue:
    """Runs in progress. The runner computes pieces of their micro-batches, of which each has a `turn` on the device."""

    def __init__(self, runner: MicroBatchRunner, turn: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        self._runner, self._turn = runner, turn
        self._clock = FairClock(credit=runner.tokens)
        self._runs: list[TrainingRun] = []
        """Those with rows to compute; the one that was served last is last."""
        self._running: dict[TrainingRun, RunningMicroBatch] = {}
        """A run's micro-batch that is computed in pieces."""
        self._ended: dict[TrainingRun, asyncio.Future[None]] = {}
        self._loop: asyncio.Task[None] | None = None

    async def run(self, runs: Sequence[TrainingRun]) -> list[list[PassResult]]:
        """Compute all rows of some runs and finish them. Raises an error of one; all are then discarded."""
        try:
            await self.compute(runs)
            return [run.finish() for run in runs]
        except BaseException:
            for run in runs:
                run.discard()
            raise

    async def compute(self, runs: Sequence[TrainingRun]) -> None:
        """Compute all rows of some runs. A run that fails has an `error`."""
        try:
            for run in runs:
                self._add(run)
            for run in runs:
                if run in self._ended:
                    await self._ended[run]
        finally:
            for run in runs:
                self._end(run)

    def _add(self, run: TrainingRun) -> None:
        if run.is_over:
            return
        self._clock.enter(run.share)
        self._runs.append(run)
        self._ended[run] = asyncio.get_running_loop().create_future()
        if self._loop is None:
            self._loop = asyncio.create_task(self._serve())

    def _end(self, run: TrainingRun) -> None:
        if run in self._ended:
            self._runs.remove(run)
            self._running.pop(run, None)
            ended = self._ended.pop(run)
            if not ended.done():
                ended.set_result(None)

    async def _serve(self) -> None:
        """Compute micro-batches until no run is left."""
        try:
            while self._runs:
                async with self._turn():
                    if self._runs:  # none if they were cancelled meanwhile
                        self._compute_next()
        finally:
            self._loop = None
            for ended in self._ended.values():  # none, unless the loop was cancelled
                ended.cancel()

    def _compute_next(self) -> None:
        """Compute a piece of each of the next micro-batches."""
        running = self._next()
        for run in (run for each in running for run in each.runs):
            self._runs.remove(run)
            self._runs.append(run)
        self._runner.advance(running)
        for each in running:
            if not each.is_done:
                self._running[each.runs[0]] = each
                continue
            for run in each.runs:
                self._running.pop(run, None)
                if each.error is not None:
                    run.error = each.error.with_traceback(None)  # which would keep the activations
                if run.is_over:
                    self._end(run)

    def _next(self) -> list[RunningMicroBatch]:
        """The micro-batches to compute at the same time. The run that was served least leads the first."""
        order = sorted(self._runs, key=lambda run: self._clock.served(run.share))
        running: list[RunningMicroBatch] = []
        while order and len(running) < self._runner.at_once:
            lead = order[0]
            self._clock.lead(lead.share)
            running.append(self._running.get(lead) or self._runner.start(*self._next_micro_batch(order)))
            order = [run for run in order if run not in running[-1].runs]
        return running

    def _next_micro_batch(self, order: Sequence[TrainingRun]) -> tuple[list[Part], bool]:
        """Rows of the run that leads and of those that fill what is left; and whether they have a gradient."""
        lead, with_grad = order[0], order[0].next_has_grad
        budget, whole_trees = lead.budget or self._runner.tokens, self._runner.cuts and with_grad
        parts: list[Part] = []
        used = 0
        for run in order:
            is_other = run.packing_group is not lead.packing_group or run.next_has_grad is not with_grad
            if is_other or run in self._running:
                continue
            before = used
            rows, used = packing.take_rows(run.next_rows, budget, used, whole_trees=whole_trees)
            if rows:
                parts.append((run, rows))
                self._clock.charge(run.share, used - before)
        return parts, with_grad
