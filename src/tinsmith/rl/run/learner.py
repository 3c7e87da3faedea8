"""What learns from the batches of a run: the policy, the critic, the coefficients of the algorithm, the task order."""

from __future__ import annotations

import copy
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinsmith.rl.algorithms.algorithm import Algorithm
from tinsmith.rl.algorithms.critic import Critic
from tinsmith.rl.algorithms.updates import BatchUpdates
from tinsmith.rl.config import RunConfig
from tinsmith.rl.data.demonstrations import Demonstrations
from tinsmith.rl.data.tasks import TaskSampler
from tinsmith.rl.policy.trainer import Trainer, Update, UpdateResult
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.rl.record.recorder import Recorder
from tinsmith.rl.record.update_metrics import update_metrics
from tinsmith.rl.rollouts.backoff import GUARDED_STALENESS, Backoff
from tinsmith.rl.rollouts.batch import Batch
from tinsmith.rl.rollouts.filters import GroupFilters
from tinsmith.rl.run.gradient_stream import GradientStream
from tinsmith.rl.run.state import State
from tinsmith.rl.types import Group


@dataclass(frozen=True, slots=True)
class StreamedGroups:
    """Groups of a batch whose gradients were computed before the batch was complete.

    Example: StreamedGroups(gradient, {0, 5})
    """

    gradient: GradientStream
    places: set[int] = field(default_factory=set)
    """Places of the groups in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """Computes the updates of batches and takes their optimizer steps. Their metrics go to the recorder."""

    config: RunConfig
    policy: Trainer
    algorithm: Algorithm
    reference: str
    """Name or tinker:// path of the model that divergences are measured from."""
    filters: GroupFilters
    backoff: Backoff
    tasks: TaskSampler
    demonstrations: Demonstrations | None
    critic: Critic | None
    recorder: Recorder

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

    @property
    def staleness_limit(self) -> int | None:
        """Most batches to sample ahead now; None: as many as the run's staleness allows."""
        return GUARDED_STALENESS if self.backoff.guarded else None

    @property
    def stream_size(self) -> int:
        """Groups of a part of the gradient to compute ahead of the rest of a batch; 0: the batch is not divided."""
        parts = self.config.updates.stream
        streams = parts > 1 and self.config.uses_rollouts and not self.backoff.guarded
        return math.ceil(self.config.groups_per_step / parts) if streams else 0

    async def stream(self, step: int, arriving: AsyncIterator[Mapping[int, Group]]) -> StreamedGroups:
        """The gradients of groups that finish before the rest of a batch, by their places. If an error ends it, the
        demonstrations of the step are drawn again."""
        drawn = self.demonstrations.cursor if self.demonstrations else 0
        try:
            streamed = StreamedGroups(self.gradient_stream(step))
            while True:
                with self.recorder.waiting():
                    part = await anext(arriving, None)
                if part is None:
                    return streamed
                with self.recorder.span("training", step):
                    await streamed.gradient.add(self.filtered_groups(list(part.values())))
                streamed.places.update(part)
        except BaseException:
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
        with self.recorder.span("training", step):
            for part in np.array_split(np.arange(len(rest)), max(1, parts)):
                await streamed.gradient.add([rest[int(number)] for number in part])
            numbers = await self.finish(step, streamed.gradient)
        self.backoff.observe(step, numbers)
        return numbers

    def gradient_stream(self, step: int) -> GradientStream:
        """The gradient of a step, to be computed in parts; `finish` takes the optimizer step."""
        return GradientStream(step, self.algorithm, self.policy, self.next_demonstrations())

    async def finish(self, step: int, stream: GradientStream) -> dict[str, float]:
        """Take the optimizer step of a streamed gradient; returns its metrics."""
        numbers = await stream.finish(self.config.optimizer, self._learning_rate(step))
        self.recorder.add(numbers)
        self.recorder.add_results(stream.results)
        return numbers

    async def update(self, step: int, batch: BatchUpdates) -> dict[str, float]:
        """Take the optimizer steps of a batch, unless it has none; returns its metrics."""
        numbers = await self._update(step, batch)
        self.recorder.add(numbers)
        return numbers

    async def _update(self, step: int, batch: BatchUpdates) -> dict[str, float]:
        rate = self._learning_rate(step)
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
        with self.recorder.span("training", step):
            updated = await self.policy.train(batch.updates, self.config.optimizer, rate)
        results = list(zip(batch.updates, updated, strict=True))
        self.recorder.add_results(results)
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

    def _learning_rate(self, step: int) -> float:
        return self.config.optimizer.learning_rate_at(step, self.config.steps)

    def gauge(self, batch: Batch) -> dict[str, float]:
        """Metrics of the filters and the back-off after the step that trained on `batch`."""
        values: dict[str, float] = {}
        if self.config.active_backoff is not None:
            values["policy/guarded"] = float(self.backoff.guarded)
        if self.config.filters and batch.groups:
            values["filters/dropped"] = 1.0 - len(self.filtered_groups(batch.groups)) / len(batch.groups)
        return values

    def state(self) -> dict[str, Any]:
        """The fields of a State that are known here; tasks that are drawn from now on are not part of them."""
        return {
            "version": self.policy.version,
            "cursor": self.tasks.cursor,
            "order": copy.deepcopy(self.tasks.state),
            "demonstrations_drawn": self.demonstrations.cursor if self.demonstrations else 0,
            "algorithm": dict(self.algorithm.state),
            "reference": self.reference,
            "backoff": self.backoff.state,
        }

    def restore(self, state: State) -> None:
        """Continue from a state; the policy, the critic and the back-off are created from it."""
        self.tasks.restore(state.cursor, state.order)
        self.algorithm.restore(state.algorithm)
        if self.demonstrations is not None:
            self.demonstrations.cursor = state.demonstrations_drawn
