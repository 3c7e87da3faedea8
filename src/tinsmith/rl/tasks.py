"""Which tasks are trained on and which are held out, and the order in which training tasks come.

A held-out task is never trained on: neither its row nor any row that asks the same. The order is a permutation for each
epoch, drawn from the seed, so one number (the cursor: draws so far) says where a run is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from tinsmith.errors import ConfigError
from tinsmith.rl.sources import Source
from tinsmith.rl.types import Task
from tinsmith.settings import Settings


class TasksConfig(Settings):
    """What to train on and what to evaluate on."""

    train: Source
    """Where training tasks come from."""
    eval: Source | None = None
    """Where held-out tasks come from; without it they are split off `train`."""
    held_out: int = Field(default=100, ge=0)
    """How many tasks to hold out: split off `train`, or the first ones of `eval` (0: all of them)."""
    split_seed: int = 0
    """Which tasks are split off; apart from the run's seed, so that runs of several seeds are judged alike."""


class Deck:
    """Training tasks in a seeded order without end. `cursor` counts the draws; a deck made with it goes on there."""

    def __init__(self, tasks: Sequence[Task], held_out: Sequence[Task], rows: np.ndarray, seed: int) -> None:
        """`rows` int64 [M] are the indices of `tasks` that may be drawn."""
        self._tasks, self._rows, self._seed = tasks, rows, seed
        self._banned = {task.messages for task in held_out}
        self._order: tuple[int, np.ndarray] = (-1, rows)
        self.cursor = 0

    def draw(self, count: int) -> list[Task]:
        """The next `count` tasks; epochs follow each other without a gap."""
        tasks: list[Task] = []
        passed_over = 0
        while len(tasks) < count:
            epoch, place = divmod(self.cursor, len(self._rows))
            task = self._tasks[int(self._epoch(epoch)[place])]
            self.cursor += 1
            if task.messages not in self._banned:
                tasks.append(task)
                passed_over = 0
            elif (passed_over := passed_over + 1) > 2 * len(self._rows):
                raise ConfigError("Every training task is held out too.", "Use another tasks.eval or a larger source.")
        return tasks

    def _epoch(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self._seed, epoch)).permutation(self._rows))
        return self._order[1]


def split(config: TasksConfig, seed: int) -> tuple[Deck, tuple[Task, ...]]:
    """The training deck and the held-out tasks. Raises ConfigError where nothing is left to train on."""
    train = config.train.load()
    rows = np.arange(len(train))
    if config.eval is not None:
        tasks = config.eval.load()
        held_out = tuple(tasks[: config.held_out or len(tasks)])
    else:
        shuffled = np.random.default_rng(config.split_seed).permutation(rows)
        held_out = tuple(train[int(row)] for row in shuffled[: config.held_out])
        rows = np.sort(shuffled[config.held_out :])
    if not len(rows):
        raise ConfigError(
            f"tasks.train has {len(train)} tasks; {config.held_out} held out leave none to train on.",
            "Set tasks.held_out lower, or give tasks.eval.",
        )
    return Deck(train, held_out, rows, seed), held_out
