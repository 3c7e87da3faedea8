"""A batch, and a batch that is being sampled: its tasks, and the groups that are finished.

A checkpoint stores batches that are not complete when the run stops as they are: no task is lost, and finished groups
are not sampled again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter

from tinsmith.rl.types import Group, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups of one step.

    Example: Batch(step=3, groups=(group, group), numbers={"sync/weights": 2.0})
    """

    step: int
    """Number of the batch, from 1: the step that trains on it, unless batches are reused or taken out of order."""
    groups: tuple[Group, ...]
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Metrics of sampling."""
    sampled_from: float = 0.0
    """Unix time at which sampling began, in seconds; 0 if it is not known."""
    sampled_until: float = 0.0
    """Unix time at which the last group was finished, in seconds."""


BATCH: TypeAdapter[Batch] = TypeAdapter(Batch)
"""Reads and writes a batch as JSON."""


@dataclass(slots=True, kw_only=True)
class BatchInProgress:
    """Groups of one step, finished or not. All lists have the same length.

    Example: BatchInProgress(step=3, tasks=[first, second], seeds=[17, 4], groups=[None, group])
    """

    step: int
    tasks: list[Task] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    groups: list[Group | None] = field(default_factory=list)
    """Finished groups; None for tasks that are being rolled out."""
    refills: int = 0
    """Times that all tasks were replaced because every rollout failed."""
    filter_refills: int = 0
    """Times that tasks were added because filters dropped groups."""
    began: float = field(default_factory=time.time)

    def add(self, tasks: Sequence[Task], seeds: Sequence[int]) -> None:
        """Add tasks to roll out."""
        self.tasks += tasks
        self.seeds += seeds
        self.groups += [None] * len(tasks)

    @property
    def open(self) -> list[int]:
        """Indices of the tasks that have no group yet."""
        return [index for index, group in enumerate(self.groups) if group is None]

    @property
    def finished(self) -> list[Group]:
        """The finished groups, in the order of their tasks."""
        return [group for group in self.groups if group is not None]

    @property
    def failed(self) -> bool:
        """Whether all groups are finished and every rollout failed."""
        return not self.open and not any(map(succeeded, self.finished))

    def copy(self) -> BatchInProgress:
        """A copy for a checkpoint. Groups in which every rollout failed are not in it: they are rolled out again."""
        groups = [group if group is not None and succeeded(group) else None for group in self.groups]
        return replace(self, tasks=[*self.tasks], seeds=[*self.seeds], groups=groups)

    def as_batch(self, numbers: Mapping[str, float]) -> Batch:
        """The complete batch."""
        return Batch(
            step=self.step,
            groups=tuple(self.finished),
            numbers=numbers,
            sampled_from=self.began,
            sampled_until=time.time(),
        )


def succeeded(group: Group) -> bool:
    """Whether a rollout of the group did not fail."""
    return any(not rollout.error for rollout in group.rollouts)
