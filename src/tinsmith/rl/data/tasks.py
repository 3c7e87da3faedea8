"""Which tasks are trained on and which are held out, and the deck that training tasks are drawn from.

A held-out task is never trained on: neither its row nor any row that asks the same. Several sources are mixed in
proportion to their sizes, in an order drawn anew for each epoch; within a source, `order.py` says which row is next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from tinsmith.errors import ConfigError
from tinsmith.rl.data.ordering import OrderConfig, RowOrder, Shuffle
from tinsmith.rl.data.row_mapping import LazySequence
from tinsmith.rl.data.sources import NamedSources, Source, Sources, as_tuple, reject_fields
from tinsmith.rl.types import Group, Message, Task
from tinsmith.settings import Settings

HeldOutTasks = Mapping[str, tuple[Task, ...]]
"""Held-out tasks by the name of their source; the name is empty where there is only one."""


def question_key(messages: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    """What a chat asks, the same however it is asked: without system messages and without what is said at its end."""
    asked = [(one.role, one.content.strip()) for one in messages if one.role != "system"]
    while asked and asked[-1][0] == "assistant":
        asked.pop()
    return tuple(asked)


def question_keys(held_out: HeldOutTasks) -> frozenset[tuple[tuple[str, str], ...]]:
    """What nobody may be taught."""
    return frozenset(question_key(task.messages) for tasks in held_out.values() for task in tasks)


class TasksConfig(Settings):
    """What to train on and what to evaluate on."""

    train: Sources | None = None
    """Where training tasks come from: a source, or a list of them; not set in a run that only learns from experts."""
    eval: NamedSources | None = None
    """Where held-out tasks come from: a source, or several by name; without it they are split off `train`."""
    held_out: int = Field(default=100, ge=0)
    """How many tasks to hold out: split off `train`, or the first ones of each `eval` (0: all of them)."""
    split_seed: int = 0
    """Which tasks are split off; apart from the run's seed, so that runs of several seeds are judged alike."""
    order: OrderConfig = Shuffle()
    """In what order training tasks come, in each source."""

    @model_validator(mode="after")
    def _asked_and_not_taught(self) -> TasksConfig:
        held_out = self.eval.values() if isinstance(self.eval, dict) else as_tuple(self.eval)
        reject_fields([*self.sources, *held_out], ("reply", "chosen", "rejected", "tools_key"), "demonstrations")
        return self

    @property
    def sources(self) -> tuple[Source, ...]:
        """Of training tasks."""
        return as_tuple(self.train)

    @property
    def evaluates(self) -> bool:
        """Whether tasks are held out."""
        return self.eval is not None or bool(self.train and self.held_out)


@dataclass(frozen=True, slots=True)
class _SampledSource:
    """One source: its tasks, and which of their rows come next."""

    tasks: Sequence[Task]
    row_order: RowOrder
    rows: int


class TaskSampler:
    """Training tasks in an order without end. `cursor` counts the draws."""

    def __init__(self, sources: Sequence[_SampledSource], held_out: HeldOutTasks, seed: int) -> None:
        self._sources, self._seed = tuple(sources), seed
        self._banned = question_keys(held_out)
        self._turns: tuple[int, np.ndarray, np.ndarray] | None = None
        self._open: dict[str, list[int]] = {}
        self.cursor = 0

    @property
    def size(self) -> int:
        """Rows in an epoch."""
        return sum(source.rows for source in self._sources)

    def draw(self, count: int) -> list[Task]:
        """The next `count` tasks; epochs follow each other without a gap."""
        tasks: list[Task] = []
        passed_over = 0
        taken: list[set[int]] = [set() for _ in self._sources]
        while len(tasks) < count:
            number, draw = self._turn(self.cursor)
            source = self._sources[number]
            row = source.row_order.pick(draw, taken[number])
            task = source.tasks[row]
            taken[number].add(row)
            self.cursor += 1
            if question_key(task.messages) not in self._banned:
                tasks.append(task)
                self._open[task.id] = [number, row]
                passed_over = 0
            elif (passed_over := passed_over + 1) > 2 * self.size:
                raise ConfigError(
                    "Every training task is held out too; system messages make no difference.",
                    "Use another tasks.eval or a larger source.",
                )
        return tasks

    def update(self, groups: Sequence[Group]) -> None:
        """What came of tasks that were drawn: their mean rewards, for orders that learn from them."""
        for number, source in enumerate(self._sources):
            mine = [group for group in groups if self._open.get(group.task.id, [-1])[0] == number and group.rewards]
            rates = [min(1.0, max(0.0, sum(group.rewards) / len(group.rewards))) for group in mine]
            source.row_order.update([self._open[group.task.id][1] for group in mine], rates)
        for group in groups:
            self._open.pop(group.task.id, None)

    @property
    def state(self) -> dict[str, Any]:
        """What a run that goes on must know beside the cursor."""
        return {"lanes": [source.row_order.state for source in self._sources], "open": self._open}

    def restore(self, cursor: int, state: Mapping[str, Any]) -> None:
        """As it was."""
        self.cursor = cursor
        self._open = dict(state.get("open", {}))
        for source, one in zip(self._sources, state.get("lanes", ()), strict=False):
            source.row_order.restore(one)

    def _turn(self, cursor: int) -> tuple[int, int]:
        """(source, number of its draw): every epoch has each source as often as it has rows."""
        epoch, place = divmod(cursor, self.size)
        if len(self._sources) == 1:
            return 0, cursor
        if self._turns is None or self._turns[0] != epoch:
            sizes = [source.rows for source in self._sources]
            turns = np.random.default_rng((self._seed, epoch)).permutation(np.repeat(np.arange(len(sizes)), sizes))
            before = np.zeros(len(turns), np.int64)
            for number in range(len(sizes)):
                mine = turns == number
                before[mine] = np.arange(int(mine.sum()))
            self._turns = (epoch, turns, before)
        number = int(self._turns[1][place])
        return number, epoch * self._sources[number].rows + int(self._turns[2][place])


def split(config: TasksConfig, seed: int) -> tuple[TaskSampler, HeldOutTasks]:
    """The training deck and the held-out tasks. Raises ConfigError where nothing is left to train on."""
    loaded = _told_apart([source.load() for source in config.sources])
    total = sum(map(len, loaded))
    rows, held_out = np.arange(total), _evaluated(config)
    begins = np.cumsum([0, *map(len, loaded)])
    if config.eval is None and loaded:
        shuffled = np.random.default_rng(config.split_seed).permutation(rows)
        held_out = {"": tuple(_at(loaded, begins, int(row)) for row in shuffled[: config.held_out])}
        rows = np.sort(shuffled[config.held_out :])
    if loaded and not len(rows):
        raise ConfigError(
            f"tasks.train has {total} tasks; {config.held_out} held out leave none to train on.",
            "Set tasks.held_out lower, or give tasks.eval.",
        )
    sources = []
    for number, (source, tasks) in enumerate(zip(config.sources, loaded, strict=True)):
        mine = rows[(rows >= begins[number]) & (rows < begins[number + 1])] - begins[number]
        if len(mine):
            lane_seed = (seed, number) if number else (seed,)
            sources.append(_SampledSource(tasks, config.order.row_order(mine, source.feature, lane_seed), len(mine)))
    return TaskSampler(sources, held_out, seed), held_out


def _told_apart(loaded: Sequence[Sequence[Task]]) -> list[Sequence[Task]]:
    """No two tasks have one id: those of a later source with the names of an earlier one begin with its number."""
    apart: list[Sequence[Task]] = []
    seen: set[str] = set()
    for number, tasks in enumerate(loaded, 1):
        first = tasks[0].id if len(tasks) else ""
        apart.append(_numbered(tasks, number) if first in seen else tasks)
        seen.add(first)
    return apart


def _numbered(tasks: Sequence[Task], number: int) -> Sequence[Task]:
    return LazySequence(len(tasks), lambda index: replace(tasks[index], id=f"{number}/{tasks[index].id}"))


def _evaluated(config: TasksConfig) -> dict[str, tuple[Task, ...]]:
    if config.eval is None:
        return {}
    named = config.eval if isinstance(config.eval, dict) else {"": config.eval}
    loaded = {name: source.load() for name, source in named.items()}
    return {name: tuple(tasks[: config.held_out or len(tasks)]) for name, tasks in loaded.items()}


def _at(loaded: Sequence[Sequence[Task]], begins: np.ndarray, row: int) -> Task:
    number = int(np.searchsorted(begins, row, side="right")) - 1
    return loaded[number][row - int(begins[number])]
