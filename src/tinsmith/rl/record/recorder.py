"""The one recorder of a run: takes what is measured, makes the row of each step, and hands it to the monitors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tinsmith.plurals import counted
from tinsmith.rl.policy.request_limit import TokenRates
from tinsmith.rl.record.metrics import group_metrics
from tinsmith.rl.record.monitors.base import Monitors
from tinsmith.rl.record.timeline import OverlapMeter, Part, Timeline
from tinsmith.rl.record.token_values import Results, with_token_values
from tinsmith.rl.rollouts.batch import Batch
from tinsmith.rl.types import Group

log = logging.getLogger(__name__)

Gauge = Callable[[Batch], Mapping[str, float]]
"""Metrics of what is not an event, read once for each step."""


@dataclass(slots=True)
class _Step:
    """What is known of the step in progress."""

    number: int = 0
    """0 if only metrics were added so far."""
    begin: float = field(default_factory=time.perf_counter)
    batch: Batch | None = None
    batch_at: float = 0.0
    version: int = 0
    """Version of the weights before the update."""
    numbers: dict[str, float] = field(default_factory=dict)
    results: Results = ()
    """The updates of the batch, with what they returned."""


class Recorder:
    """Makes a row of each step, of the metrics of its rollouts, what was added to it, the gauges, rates and times.

    Example: recorder.begin(3); recorder.take(batch, version=2); recorder.add({"optim/lr": 1e-4}); then finish_step(3)
    """

    def __init__(
        self, steps: int, monitors: Monitors, timeline: Timeline, rates: TokenRates, overlap: OverlapMeter
    ) -> None:
        """`steps`: number of steps of the run."""
        self._steps, self._monitors, self._timeline, self._rates = steps, monitors, timeline, rates
        self._overlap = overlap
        self._gauges: list[Gauge] = []
        self._step: _Step | None = None

    def read_at_each_step(self, gauge: Gauge) -> None:
        """Read the metrics of `gauge` when a row is made."""
        self._gauges.append(gauge)

    @property
    def step(self) -> int:
        """The step in progress; 0 between steps."""
        return self._step.number if self._step else 0

    def begin(self, step: int) -> None:
        """Start the clock of a step. Metrics that were added since the last one are of this step."""
        waiting = self._step.numbers if self._step and not self._step.number else {}
        self._step = _Step(step, numbers=waiting)

    def take(self, batch: Batch, version: int) -> None:
        """Record the batch that the step trains on, before weights of `version` train on it."""
        self._step = self._step or _Step()
        self._step.batch, self._step.version, self._step.batch_at = batch, version, time.perf_counter()

    def add(self, values: Mapping[str, float]) -> None:
        """Add metrics to the row of the step in progress."""
        self._step = self._step or _Step()
        self._step.numbers.update(values)

    def add_results(self, results: Results) -> None:
        """Record updates of the step in progress: the records of its rollouts have their advantages and logprobs."""
        self._step = self._step or _Step()
        self._step.results = (*self._step.results, *results)

    def finish_step(self, number: int) -> tuple[Sequence[Group], dict[str, float]]:
        """Hand the rollouts and the row of a step to the monitors; returns both, empty if nothing was recorded."""
        step, self._step = self._step, None
        if step is None:
            return (), {}
        batch, end = step.batch or Batch(step=number, groups=()), time.perf_counter()
        self._timeline.add("sampling", number, batch.sampled_from, batch.sampled_until)
        if batch.groups:
            self._monitors.rollouts(number, "train", with_token_values(batch.groups, step.results))
        row = {
            **_sampled(batch, step.version),
            **step.numbers,
            **{name: value for gauge in self._gauges for name, value in gauge(batch).items()},
            **self._rates.lap(step.numbers.get("tokens/trained", 0.0)),
            **self._overlap.lap(),
            "time/step": end - step.begin,
            "time/sampling": batch.sampled_until - batch.sampled_from,
        }
        if step.batch is not None:
            row |= {"time/rollouts": step.batch_at - step.begin, "time/update": end - step.batch_at}
        self._monitors.metrics(number, row)
        reward = row.get("reward/mean", float("nan"))
        log.info("Step %d of %d: reward %.4g, %.2f seconds", number, self._steps, reward, row["time/step"])
        if failed := [rollout.error for group in batch.groups for rollout in group.rollouts if rollout.error]:
            log.warning("%s of step %d failed; the first: %s", counted(len(failed), "rollout"), number, failed[0])
        return batch.groups, row

    def evaluation(self, step: int, groups: Sequence[Group], values: Mapping[str, float]) -> None:
        """Hand the rollouts and the row of an evaluation to the monitors."""
        self._monitors.rollouts(step, "eval", groups)
        self._monitors.metrics(step, values)

    @contextmanager
    def span(self, part: Part, step: int) -> Iterator[None]:
        """Write a block to the timeline as a part of `step`, if it ends without an error."""
        with self._timeline.span(part, step):
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a block in which the trainer waits for rollouts."""
        with self._overlap.waiting():
            yield

    def close(self) -> None:
        """Close the timeline and the monitors."""
        self._timeline.close()
        self._monitors.close()


def record_sampled(monitors: Monitors, batch: Batch, rates: TokenRates) -> None:
    """Hand the row of a batch to the monitors of a process that only samples."""
    monitors.metrics(batch.step, {**_sampled(batch, batch.groups[0].version), **rates.lap()})


def _sampled(batch: Batch, version: int) -> dict[str, float]:
    return {**(group_metrics(batch.groups, version) if batch.groups else {}), **batch.numbers}
