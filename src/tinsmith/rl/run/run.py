"""A run in progress: its parts, and the methods that a training loop calls in each step.

The built-in loop is in `loop.py`; `open.py` creates the parts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tinsmith.rl.algorithms.algorithm import Algorithm
from tinsmith.rl.algorithms.updates import BatchUpdates
from tinsmith.rl.callbacks import Callbacks
from tinsmith.rl.config import RunConfig
from tinsmith.rl.ending.stop import StopSignal
from tinsmith.rl.ending.until import EndCondition
from tinsmith.rl.evaluate import Evaluator
from tinsmith.rl.evaluation import benchmarks
from tinsmith.rl.policy.trainer import Trainer
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.rl.record import comparison
from tinsmith.rl.record.recorder import Recorder
from tinsmith.rl.rollouts.batch import Batch
from tinsmith.rl.rollouts.queue import BatchQueue
from tinsmith.rl.run.checkpointer import Checkpointer
from tinsmith.rl.run.gradient_stream import GradientStream
from tinsmith.rl.run.learner import Learner, StreamedGroups
from tinsmith.rl.types import Group

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The parts of a run, and what a loop does with them. All parts live as long as the run."""

    config: RunConfig
    """The settings of the run, with the number of its steps."""
    batches: BatchQueue
    """Where the rollouts of each step come from."""
    learner: Learner
    """What learns from them: policy, critic, coefficients of the algorithm, task order."""
    evaluator: Evaluator
    """Evaluates the policy on the held-out tasks."""
    recorder: Recorder
    """Makes the row of each step for the monitors; `recorder.add({"my/metric": 0.5})` adds a metric to it."""
    checkpoints: Checkpointer
    """Saves checkpoints, and the states to resume from in the run folder."""
    ending: EndCondition
    """Follows the conditions of `until`."""
    stop: StopSignal
    """Whether the run is to stop early."""
    callbacks: Callbacks = field(default_factory=lambda: Callbacks(()))
    """Code of the user, called after steps and evaluations."""

    @property
    def policy(self) -> Trainer:
        """The policy in training."""
        return self.learner.policy

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm: `score` computes the updates of groups."""
        return self.learner.algorithm

    def steps(self) -> range:
        """The remaining steps, counted from 1."""
        state = self.checkpoints.folder.state
        return range((state.step if state else 0) + 1, self.config.steps + 1)

    async def evaluate_before_training(self) -> bool:
        """Evaluate the initial weights, and the score of the best constant answer; or those of the last step, if an
        early stop cancelled that evaluation. Returns whether the run has ended, as `finish_step` does."""
        state = self.checkpoints.folder.state
        if not (self.evaluator.due(0, self.config.steps) if state is None else state.evaluation_due):
            return False
        step = state.step if state else 0
        await self._evaluate(step, {} if step else await self.evaluator.baseline(await self.policy.snapshot()))
        last = bool(step) and self._is_last(step)
        if last or self.checkpoints.best.unsaved is not None:
            await self.checkpoints.save(self.checkpoints.resume_point(step), last=last)
        if last:
            await self._end(step)
        return last

    async def stream(self, step: int) -> StreamedGroups | None:
        """With updates.stream, the gradients of groups that finish before the rest of the batch of `step`, for `train`;
        else None.

        Raises StopRequested if the run is to stop.
        """
        await self._begin(step)
        size = self.learner.stream_size
        return await self.learner.stream(step, self.batches.stream(step, size)) if size else None

    async def next_batch(self, step: int) -> Batch:
        """The batch that `step` trains on. Raises StopRequested if the run is to stop."""
        await self._begin(step)
        with self.recorder.waiting():
            batch = await self.batches.next(step)
        await self.checkpoints.write_complete()
        self.recorder.take(batch, self.policy.version)
        return batch

    async def _begin(self, step: int) -> None:
        """Begin a step, once. Waits for room on the disk; raises StopRequested if the run is to stop."""
        if self.recorder.step != step:
            self.stop.check()
            await self.checkpoints.folder.wait_for_room(self.stop)
            self.recorder.begin(step)
        self.batches.limit_staleness(self.learner.staleness_limit)

    async def train(
        self, step: int, groups: Sequence[Group], streamed: StreamedGroups | None = None
    ) -> dict[str, float]:
        """Compute the updates of the groups of a batch, and take their optimizer steps; returns metrics.

        `streamed`: what `stream` returned for the step.
        """
        return await self.learner.train(step, groups, streamed)

    def filtered_groups(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """The groups that pass the filters; with filter_refills, at most groups_per_step, or all of a search for groups
        solved in part."""
        return self.learner.filtered_groups(groups)

    def next_demonstrations(self) -> list[TrainingRow]:
        """The rows of demonstrations for one step."""
        return self.learner.next_demonstrations()

    async def update(self, step: int, batch: BatchUpdates) -> dict[str, float]:
        """Take the optimizer steps of a batch, unless it has none; returns its metrics."""
        return await self.learner.update(step, batch)

    def gradient_stream(self, step: int) -> GradientStream:
        """The gradient of a step, to be computed in parts; `finish` takes the optimizer step."""
        return self.learner.gradient_stream(step)

    async def finish(self, step: int, stream: GradientStream) -> dict[str, float]:
        """Take the optimizer step of a streamed gradient; returns its metrics."""
        return await self.learner.finish(step, stream)

    async def finish_step(self, step: int) -> bool:
        """Record `step`, let the task order and the conditions of `until` learn from it, and let sampling go on by the
        new weights; then evaluate and save if due.

        Sampling does not wait for the evaluation or the checkpoint, except with staleness 0. The state is written last,
        after all files of the step. Returns whether the run has ended: by its last step, or by a condition of `until`.
        """
        groups, row = self.recorder.finish_step(step)
        self.learner.tasks.update(groups)
        self.ending.observe(row)
        self.ending.end(await self.callbacks.call("on_step", self, step, row))
        last = self._is_last(step)
        point = self.checkpoints.resume_point(step)
        self.batches.limit_staleness(self.learner.staleness_limit)
        with self.recorder.span("publishing", step):
            await self.batches.publish(step)
        if self.evaluator.due(step, step if last else self.config.steps):
            with self.recorder.span("evaluation", step):
                await self._evaluate(step, {})
            last = last or self._is_last(step)
        if last and (fault := self.ending.fault):  # after the evaluation, which may be the first
            log.warning("%s", fault)
        if last or self.checkpoints.due(step):
            with self.recorder.span("saving", step):
                await self.checkpoints.save(point, last=last)
        if last:
            await self._end(step)
        return last

    async def _end(self, step: int) -> None:
        self._compare(step)
        await self.callbacks.call("on_end", self)

    async def stop_after(self, step: int, *, evaluation_due: bool = False) -> None:
        """Save a checkpoint after `step` to resume from, unless there is one. `evaluation_due`: with the evaluation.

        Rollouts that are not finished at the end of the grace period are cancelled.
        """
        self.stop.stopped_at = f"step {step} of {self.config.steps}"
        await self.batches.stop(self.stop.grace_left)
        await self.checkpoints.save_at_stop(step, evaluation_due=evaluation_due)
        log.info("Stopped by %s after %s", self.stop.reason, self.stop.stopped_at)
        await self.callbacks.call("on_end", self)

    def _is_last(self, step: int) -> bool:
        """Whether the run ends after `step`."""
        if step < self.config.steps and (reason := self.ending.reason):
            log.info("Ended after step %d: %s", step, reason)
            return True
        return step == self.config.steps

    async def _evaluate(self, step: int, baseline: Mapping[str, float]) -> None:
        begin = time.perf_counter()
        snapshot = await self.policy.snapshot()
        evaluation = await self.stop.finish(lambda: self.evaluator.run(step, snapshot))
        values = evaluation.values
        benchmarks.write(self.checkpoints.folder.path, step, evaluation.scores)
        self.recorder.evaluation(
            step, evaluation.groups, {**values, **baseline, "time/eval": time.perf_counter() - begin}
        )
        if step:
            self.ending.observe(values)
            self.checkpoints.best.observe(values)
        self.ending.end(await self.callbacks.call("on_evaluation", self, step, values))

    def _compare(self, step: int) -> None:
        """Compare the evaluations before the first step and after the last one, or after the best one if that is the
        result."""
        best = self.checkpoints.best.saved
        if (settings := self.config.eval).compare:
            folder, sources, seed = self.checkpoints.folder.path, self.evaluator.sources, self.config.seed
            last = best.step if best else step
            rows = comparison.compare_steps(folder, last, settings.threshold, sources, seed)
            rows += benchmarks.compare_steps(folder, last, seed)
            if rows or comparison.read(folder):
                comparison.write(folder, rows)
