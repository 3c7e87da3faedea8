"""A run in progress: its parts, and the methods that the training loop calls in each step.

`open.assemble` creates the parts.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinsmith.plurals import counted
from tinsmith.rl.algorithms.algorithm import Algorithm
from tinsmith.rl.algorithms.critic import Critic
from tinsmith.rl.algorithms.updates import BatchUpdates
from tinsmith.rl.config import RunConfig
from tinsmith.rl.data.demonstrations import Demonstrations
from tinsmith.rl.data.tasks import TaskSampler
from tinsmith.rl.ending.stop import StopRequested, StopSignal
from tinsmith.rl.ending.until import EndCondition
from tinsmith.rl.evaluate import Evaluator
from tinsmith.rl.policy.base import Policy, Update, UpdateResult
from tinsmith.rl.policy.request_limit import TokenRates
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.rl.record import comparison, metrics
from tinsmith.rl.record.monitors.base import Monitors
from tinsmith.rl.record.timeline import OverlapMeter, Timeline
from tinsmith.rl.record.update_metrics import update_metrics
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rollouts.backoff import GUARDED_STALENESS, Backoff
from tinsmith.rl.rollouts.batch_source import BatchSource
from tinsmith.rl.rollouts.filters import GroupFilters
from tinsmith.rl.rollouts.progress import Batch
from tinsmith.rl.run.deferred import DeferredStates, ResumePoint
from tinsmith.rl.run.folder import RunFolder
from tinsmith.rl.run.gradient_stream import GradientStream
from tinsmith.rl.run.parts import Connect as Connect
from tinsmith.rl.run.state import RandomStates, State, as_metadata, json_values
from tinsmith.rl.shadow.service import ShadowService
from tinsmith.rl.types import Group

log = logging.getLogger(__name__)


class StepTimer:
    """Wall-clock seconds of the parts of a step."""

    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()
        self.parts: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """Record the time since the last call as that of `part`."""
        now = time.perf_counter()
        self.parts[f"time/{part}"] = now - self._last
        self._last = now

    def total(self) -> float:
        """Seconds since the timer was created."""
        return time.perf_counter() - self._begin


@dataclass(frozen=True, slots=True)
class StreamedGroups:
    """Groups of a batch whose gradients were computed before the batch was complete.

    Example: StreamedGroups(gradient, {0, 5})
    """

    gradient: GradientStream
    places: set[int] = field(default_factory=set)
    """Places of the groups in the batch."""


@dataclass(slots=True)
class StepInProgress:
    """What is known of the current step, for its metrics and for what learns from them."""

    batch: Batch | None = None
    """The batch that the step trains on."""
    version: int = 0
    """Version of the weights before the update."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Metrics of the update."""
    logged: dict[str, float] = field(default_factory=dict)
    """All metrics, with times; empty if the step is not logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The parts of a run, and what the loop does with them. All parts live as long as the run."""

    config: RunConfig
    folder: RunFolder
    policy: Policy
    task_sampler: TaskSampler
    batches: BatchSource
    filters: GroupFilters
    algorithm: Algorithm
    evaluator: Evaluator
    rewards: Rewards | None
    """Reward functions of the evaluation, if there are held-out tasks."""
    monitors: Monitors
    reference: str
    """Name or tinker:// path of the model that divergences are measured from."""
    critic: Critic | None
    demonstrations: Demonstrations | None
    store: dict[str, Any]
    """Values that all rollouts share, which workflows read and write."""
    rates: TokenRates
    ending: EndCondition
    stop: StopSignal
    states: DeferredStates
    timeline: Timeline
    overlap: OverlapMeter
    backoff: Backoff
    shadow: ShadowService | None = None
    """Shadow steps of the rollouts, if they need any."""
    current: StepInProgress = field(default_factory=StepInProgress, init=False)

    def steps(self) -> range:
        """The remaining steps, counted from 1."""
        done = self.folder.state.step if self.folder.state else 0
        return range(done + 1, self.config.steps + 1)

    async def evaluate_before_training(self) -> bool:
        """Evaluate the initial weights, and the score of the best constant answer; or those of the last step, if an
        early stop cancelled that evaluation. Returns whether the run has ended, as `finish_step` does."""
        state = self.folder.state
        if not (self.evaluator.due(0, self.config.steps) if state is None else state.evaluation_due):
            return False
        step, baseline = state.step if state else 0, dict[str, float]()
        if not step and self.rewards is not None:
            baseline = await self.evaluator.baseline(self.rewards, await self.policy.snapshot())
        await self._evaluate(step, baseline)
        last = bool(step) and self._is_last(step)
        if last:
            await self._save(self._resume_point(step), last)
            self._compare(step)
        return last

    def filtered_groups(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """The groups that pass the filters; with filter_refills, at most groups_per_step, or all of a search for groups
        solved in part."""
        passed = self.filters.remaining(groups)
        cut = self.config.filter_refills and not self.config.min_partial_groups
        return passed[: self.config.groups_per_step] if cut else passed

    def next_demonstrations(self) -> list[TrainingRow]:
        """The rows of demonstrations for one step."""
        if self.demonstrations is None or self.config.demonstrations is None:
            return []
        alone = not self.config.uses_rollouts
        count = self.config.demonstrations.count(self.config.groups_per_step, self.config.group_size, alone=alone)
        return self.demonstrations.draw(count)

    async def stream(self, step: int) -> StreamedGroups | None:
        """With updates.stream, the gradients of groups that finish before the rest of the batch of `step`; else None.

        Raises StopRequested if the run is to stop.
        """
        parts = self.config.updates.stream
        if parts <= 1 or not self.config.uses_rollouts or self.backoff.guarded:
            return None
        drawn = self.demonstrations.cursor if self.demonstrations else 0
        self._limit_staleness()
        streamed = StreamedGroups(self.gradient_stream(step))
        arriving = self.batches.stream(step, math.ceil(self.config.groups_per_step / parts))
        try:
            while True:
                with self.overlap.waiting():
                    part = await anext(arriving, None)
                if part is None:
                    return streamed
                with self.timeline.span("training", step):
                    await streamed.gradient.add(self.filtered_groups(list(part.values())))
                streamed.places.update(part)
        except StopRequested:
            if self.demonstrations is not None:
                self.demonstrations.cursor = drawn
            raise

    async def train(
        self, step: int, groups: Sequence[Group], streamed: StreamedGroups | None = None
    ) -> dict[str, float]:
        """Compute the updates of the groups of a batch, and take their optimizer steps; returns metrics.

        With updates.stream, the gradient is computed in parts; `streamed` are those that `stream` has computed.
        """
        if streamed is None:
            update = await self.algorithm.score(step, self.filtered_groups(groups), self.next_demonstrations())
            return await self.update(step, update)
        rest = self.filtered_groups([group for at, group in enumerate(groups) if at not in streamed.places])
        parts = math.ceil(len(rest) * self.config.updates.stream / self.config.groups_per_step)
        with self.timeline.span("training", step):
            for part in np.array_split(np.arange(len(rest)), max(1, parts)):
                await streamed.gradient.add([rest[int(number)] for number in part])
            numbers = await self.finish(step, streamed.gradient)
        self.backoff.observe(step, numbers)
        return numbers

    def _limit_staleness(self) -> None:
        self.batches.limit_staleness(GUARDED_STALENESS if self.backoff.guarded else None)

    def gradient_stream(self, step: int) -> GradientStream:
        """The gradient of a step, to be computed in parts; `finish` takes the optimizer step."""
        return GradientStream(step, self.algorithm, self.policy, self.next_demonstrations())

    async def finish(self, step: int, stream: GradientStream) -> dict[str, float]:
        """Take the optimizer step of a streamed gradient; returns its metrics."""
        numbers = await stream.finish(
            self.config.optimizer, self.config.optimizer.learning_rate_at(step, self.config.steps)
        )
        self.current.numbers.update(numbers)
        return numbers

    async def update(self, step: int, batch: BatchUpdates) -> dict[str, float]:
        """Take the optimizer steps of a batch, unless it has none; returns its metrics."""
        numbers = await self._update(step, batch)
        self.current.numbers.update(numbers)
        return numbers

    async def _update(self, step: int, batch: BatchUpdates) -> dict[str, float]:
        rate = self.config.optimizer.learning_rate_at(step, self.config.steps)
        skipped = {"optim/skipped": 1.0, "optim/lr": rate, **batch.numbers}
        if not batch.updates:
            return skipped
        if guarded := self.backoff.guarded:
            logprobs = tuple(await self.policy.logprobs(batch.rows))
            measured = update_metrics([(Update(rows=tuple(batch.rows)), UpdateResult(logprobs=logprobs, metrics={}))])
            if self.backoff.observe(step, measured):
                return {**skipped, **measured}
        critic_metrics: dict[str, float] = {}
        if self.critic is not None:
            critic_metrics = await self.critic.learn(step, batch.rows)
            if step <= self.critic.config.warmup_steps:
                return {**skipped, **critic_metrics}
        with self.timeline.span("training", step):
            updated = await self.policy.train(batch.updates, self.config.optimizer, rate)
        results = list(zip(batch.updates, updated, strict=True))
        numbers = update_metrics(results)
        if not guarded:
            self.backoff.observe(step, numbers)
        return {
            **numbers,
            "optim/lr": rate,
            **batch.numbers,
            **self.algorithm.adapt_coefficients(results, batch.rows, batch.numbers),
            **critic_metrics,
        }

    def log(self, step: int, timer: StepTimer) -> None:
        """Report a step that has been trained on to the monitors and the log, with its times."""
        batch, seconds = self.current.batch, timer.total()
        if batch is None:
            return
        self.timeline.add("sampling", step, batch.sampled_from, batch.sampled_until)
        if batch.groups:
            self.monitors.rollouts(step, "train", batch.groups)
        self.current.logged = values = {
            **self._measured(batch),
            **self.rates.lap(self.current.numbers.get("tokens/trained", 0.0)),
            **self.overlap.lap(),
            "time/step": seconds,
            "time/sampling": batch.sampled_until - batch.sampled_from,
            **timer.parts,
        }
        self.monitors.metrics(step, values)
        reward = values.get("reward/mean", float("nan"))
        log.info("Step %d of %d: reward %.4g, %.2f seconds", step, self.config.steps, reward, seconds)
        if failed := [rollout.error for group in batch.groups for rollout in group.rollouts if rollout.error]:
            log.warning("%s of step %d failed; the first: %s", counted(len(failed), "rollout"), step, failed[0])

    def _measured(self, batch: Batch) -> dict[str, float]:
        """The metrics of the current step without times; those of shadow steps are since the previous call."""
        sampled = metrics.group_metrics(batch.groups, self.current.version) if batch.groups else {}
        if self.config.active_backoff is not None:
            sampled["policy/guarded"] = float(self.backoff.guarded)
        if self.config.filters and batch.groups:
            sampled["filters/dropped"] = 1.0 - len(self.filtered_groups(batch.groups)) / len(batch.groups)
        shadow = self.shadow.metrics() if self.shadow else {}
        return {**sampled, **batch.numbers, **self.current.numbers, **shadow}

    def _observe(self) -> None:
        """Let the task order and the conditions of `until` learn from the current step, once."""
        if (batch := self.current.batch) is not None:
            self.task_sampler.update(batch.groups)
            self.ending.observe(self.current.logged or self._measured(batch))
        self.current.batch = None

    async def next_batch(self, step: int) -> Batch:
        """The batch that `step` trains on. Raises StopRequested if the run is to stop."""
        self._limit_staleness()
        with self.overlap.waiting():
            batch = await self.batches.next(step)
        self.current.batch, self.current.version = batch, self.policy.version
        self.current.numbers, self.current.logged = {}, {}
        await self.states.write_complete()
        return batch

    async def finish_step(self, step: int) -> bool:
        """Observe the rewards and metrics of `step`, and let sampling go on by the new weights; then evaluate and save
        if due.

        Sampling does not wait for the evaluation or the checkpoint, except with staleness 0. The state is written last,
        after all files of the step. Returns whether the run has ended: by its last step, or by a condition of `until`.
        """
        self._observe()
        last, every = self._is_last(step), self.config.checkpoint.every
        point = self._resume_point(step)
        self._limit_staleness()
        with self.timeline.span("publishing", step):
            await self.batches.mark_trained(step)
        if self.evaluator.due(step, step if last else self.config.steps):
            with self.timeline.span("evaluation", step):
                await self._evaluate(step, {})
            last = last or self._is_last(step)
        if last and (fault := self.ending.fault):  # after the evaluation, which may be the first
            log.warning("%s", fault)
        if last or (every and step % every == 0):
            with self.timeline.span("saving", step):
                await self._save(point, last)
        if last:
            self._compare(step)
        return last

    async def stop_after(self, step: int, *, evaluation_due: bool = False) -> None:
        """Save a checkpoint after `step` to resume from, unless there is one. `evaluation_due`: with the evaluation.

        Rollouts that are not finished at the end of the grace period are cancelled.
        """
        self.stop.stopped_at = f"step {step} of {self.config.steps}"
        await self.batches.stop(self.stop.grace_left)
        await self.states.write_all()
        saved = self.folder.state
        if saved is None or (saved.step, saved.evaluation_due) != (step, evaluation_due):
            await self._save(self._resume_point(step), last=False, evaluation_due=evaluation_due)
            await self.states.write_all()
        log.info("Stopped by %s after %s", self.stop.reason, self.stop.stopped_at)

    def _is_last(self, step: int) -> bool:
        """Whether the run ends after `step`."""
        if step < self.config.steps and (reason := self.ending.reason):
            log.info("Ended after step %d: %s", step, reason)
            return True
        return step == self.config.steps

    async def _evaluate(self, step: int, baseline: Mapping[str, float]) -> None:
        timer = StepTimer()
        snapshot = await self.policy.snapshot()
        groups, values = await self.stop.finish(lambda: self.evaluator.run(step, snapshot))
        self.monitors.rollouts(step, "eval", groups)
        self.monitors.metrics(step, {**values, **baseline, "time/eval": timer.total()})
        if step:
            self.ending.observe(values)

    def _compare(self, step: int) -> None:
        """Compare the evaluations before the first step and after the last one, if both were made."""
        files = {at: self.folder.path / "rollouts" / f"eval-{at:06}.jsonl" for at in (0, step)}
        if not (self.config.eval.compare and step and all(file.exists() for file in files.values())):
            return
        first, last = (
            (f"step {at}", comparison.read_results(file, self.config.eval.threshold)) for at, file in files.items()
        )
        compared = comparison.compare_results(first, last, self.evaluator.sources, self.config.seed)
        comparison.write(self.folder.path, compared)

    def _resume_point(self, step: int) -> ResumePoint:
        """Where a run resumes from after `step`; tasks that are drawn from now on are not part of it."""
        before = self.folder.state
        state = State(
            step=step,
            version=self.policy.version,
            path="",
            cursor=self.task_sampler.cursor,
            order=copy.deepcopy(self.task_sampler.state),
            demonstrations_drawn=self.demonstrations.cursor if self.demonstrations else 0,
            random=RandomStates.capture(),
            algorithm=dict(self.algorithm.state),
            backoff=self.backoff.state,
            reference=self.reference,
            origin=before.origin if before else "",
        )
        return ResumePoint(state, self.batches.position())

    async def _save(self, point: ResumePoint, last: bool, *, evaluation_due: bool = False) -> None:
        """Save the weights, and the state at `point` as soon as its batches are complete."""
        name = "final" if last else f"step-{point.state.step:06}"
        ttl = None if last else self.config.checkpoint.ttl_seconds
        values = {
            "random": RandomStates.capture(),
            "store": json_values(self.store),
            "ending": self.ending.state,
            "evaluation_due": evaluation_due,
            "critic_path": await self.critic.save(f"critic-{name}", ttl) if self.critic else "",
        }
        point = point.with_values(values)
        stored = point.state.model_copy(update={"batches": await self.batches.state_at(point.position)})
        path = await self.policy.save(name, ttl, as_metadata(stored, self.config.seed))
        sampling_path = await self.policy.save_for_sampling(name) if last else ""
        self.states.add(point.with_values({"path": path, "sampling_path": sampling_path}))
        await (self.states.write_all() if last else self.states.write_complete())
