"""Data of a run: its tasks and demonstrations, each read at most once and not before it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tinsmith.rl.data.demonstrations import DemonstrationsConfig
from tinsmith.rl.data.tasks import HeldOutTasks, TaskSampler, TasksConfig, split
from tinsmith.rl.types import Demonstration


class RunData:
    """Reads the data when an attribute is first used. Raises ConfigError if it cannot be read."""

    def __init__(self, tasks: TasksConfig, demonstrations: DemonstrationsConfig | None, seed: int) -> None:
        self._tasks, self._demonstrations, self._seed = tasks, demonstrations, seed

    @cached_property
    def tasks(self) -> tuple[TaskSampler, HeldOutTasks]:
        """Sampler of training tasks, and the held-out tasks."""
        return split(self._tasks, self._seed)

    @cached_property
    def demonstrations(self) -> Sequence[Sequence[Demonstration]]:
        """Demonstrations of each source; none without settings for them."""
        return self._demonstrations.load() if self._demonstrations is not None else ()
