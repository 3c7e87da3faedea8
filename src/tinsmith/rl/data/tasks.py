"""Training tasks and held-out tasks, and the sampler that training tasks are drawn from.

A held-out task is never trained on: neither its row nor any row with the same question. Several sources are mixed in
proportion to their sizes, in an order drawn for each epoch; within a source, `ordering.py` picks the row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from pydantic import Field, model_validator
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.rl.data.ordering import LoadedSource, OrderConfig, RowOrder, Shuffle
from tinsmith.rl.data.row_mapping import LazySequence, RowMapping
from tinsmith.rl.data.sources import NamedSources, Source, Sources, as_tuple, reject_fields
from tinsmith.rl.types import Group, Message, Task
from tinsmith.settings import Settings

HeldOutTasks = Mapping[str, tuple[Task, ...]]
"""Held-out tasks by the name of their source; the name is empty if there is only one source."""

DEFAULT_HELD_OUT = 100

QuestionKey = tuple[tuple[str, str], ...]
"""Role and content of the messages that ask a question."""


def question_key(messages: Sequence[Message]) -> QuestionKey:
    """Key of the question of a chat: its messages without system messages and trailing assistant messages."""
    key = [(message.role, _question(message)) for message in messages if message.role != "system"]
    while key and key[-1][0] == "assistant":
        key.pop()
    return tuple(key)


def _question(message: Message) -> str:
    """The text of a message, with its images."""
    return message.content.strip() + "".join(f"\n{at}: {image.digest}" for at, image in message.images)


def question_keys(held_out: HeldOutTasks) -> frozenset[QuestionKey]:
    """Keys of all held-out questions."""
    return frozenset(_task_key(task) for tasks in held_out.values() for task in tasks)


def _task_key(task: Task) -> QuestionKey:
    """Key of the question; of a task whose workflow writes the question, its id."""
    return question_key(task.messages) or (("id", task.id),)


def _drawn_key(task: Task) -> str:
    """Key of a drawn task: rows of one source may share an id."""
    return f"{task.id} {hashlib.sha256(repr(_task_key(task)).encode()).hexdigest()[:16]}"


class TasksConfig(Settings):
    """Tasks to train on and tasks to evaluate on."""

    train: Sources | None = None
    """Training tasks: a source, or a list of sources. Not set in a run that learns from demonstrations alone."""
    eval: NamedSources | None = None
    """Held-out tasks: a source, or several by name. If not set, they are split off `train`."""
    held_out: int | None = Field(default=None, ge=0)
    """Number of held-out tasks: split off `train`, or the first ones of each `eval` source (0: all of them). null: 100;
    split off fewer than 1,000 tasks, a tenth of them, rounded up."""
    split_seed: int = 0
    """Seed of the split. Separate from the run's seed, so that runs with different seeds share the held-out tasks."""
    order: OrderConfig = Shuffle()
    """Order of the training tasks within each source."""

    @model_validator(mode="after")
    def _check_fields_of_sources(self) -> TasksConfig:
        held_out = self.eval.values() if isinstance(self.eval, dict) else as_tuple(self.eval)
        reject_fields(
            [*self.sources, *held_out], ("reply", "chosen", "rejected", "label_key", "tools_key"), "demonstrations"
        )
        return self

    @property
    def sources(self) -> tuple[Source, ...]:
        """Sources of training tasks."""
        return as_tuple(self.train)

    @property
    def image_field(self) -> str:
        """The field with images of the first source that names one; empty if none does."""
        held_out = self.eval.values() if isinstance(self.eval, dict) else as_tuple(self.eval)
        fields = (source.images for source in (*self.sources, *held_out) if isinstance(source, RowMapping))
        return next(filter(None, fields), "")

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out tasks."""
        return self.eval is not None or bool(self.train and self.held_out != 0)


class TaskSampler(Protocol):
    """Endless sequence of training tasks."""

    cursor: int
    """Number of draws."""

    @property
    def size(self) -> int:
        """Rows in an epoch."""
        ...

    @property
    def examples(self) -> list[Task]:
        """The first task of each source, which is not drawn by this."""
        ...

    def draw(self, count: int) -> list[Task]:
        """Return the next `count` tasks; epochs follow each other without a gap."""
        ...

    def update(self, groups: Sequence[Group]) -> None:
        """Report the mean rewards of drawn tasks to orders that learn from them."""
        ...

    @property
    def state(self) -> dict[str, Any]:
        """State beyond the cursor, as it is stored in state.json."""
        ...

    def restore(self, cursor: int, state: Mapping[str, Any]) -> None:
        """Load a saved cursor and `state`."""
        ...


@dataclass(frozen=True, slots=True)
class SampledSource:
    """Tasks of one source with their order; `rows` of them are trained on."""

    tasks: Sequence[Task]
    row_order: RowOrder
    rows: int


class SourceSampler(TaskSampler):
    """Tasks of one or several sources, in proportion to their sizes."""

    def __init__(self, sources: Sequence[SampledSource], held_out: HeldOutTasks, seed: int) -> None:
        self._sources, self._seed = tuple(sources), seed
        self._held_out_keys = question_keys(held_out)
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None
        self._drawn: dict[str, list[int]] = {}
        """Source and row of each task that was drawn of an order that learns, by its key."""
        self.cursor = 0

    @property
    @override
    def size(self) -> int:
        return sum(source.rows for source in self._sources)

    @property
    @override
    def examples(self) -> list[Task]:
        return [source.tasks[0] for source in self._sources]

    @override
    def draw(self, count: int) -> list[Task]:
        tasks: list[Task] = []
        skipped = 0
        taken: list[set[int]] = [set() for _ in self._sources]
        while len(tasks) < count:
            number, draw = self._source_of_draw(self.cursor)
            source = self._sources[number]
            row = source.row_order.pick(draw, taken[number])
            task = source.tasks[row]
            taken[number].add(row)
            self.cursor += 1
            if _task_key(task) not in self._held_out_keys:
                tasks.append(task)
                if source.row_order.learns:
                    self._drawn[_drawn_key(task)] = [number, row]
                skipped = 0
            elif (skipped := skipped + 1) > 2 * self.size:
                raise ConfigError(
                    "Every training task is held out too; system messages make no difference.",
                    "Use another tasks.eval or a larger source.",
                )
        return tasks

    @override
    def update(self, groups: Sequence[Group]) -> None:
        rows = dict[int, list[int]]()
        rates = dict[int, list[float]]()
        for group in groups:
            if group.rewards and (place := self._drawn.get(_drawn_key(group.task))):
                rows.setdefault(place[0], []).append(place[1])
                mean = sum(group.rewards) / len(group.rewards)
                rates.setdefault(place[0], []).append(min(1.0, max(0.0, mean)))
        for number, learned in rows.items():
            self._sources[number].row_order.update(learned, rates[number])

    @property
    @override
    def state(self) -> dict[str, Any]:
        return {"lanes": [source.row_order.state for source in self._sources], "drawn": self._drawn}

    @override
    def restore(self, cursor: int, state: Mapping[str, Any]) -> None:
        self.cursor = cursor
        self._drawn = dict(state.get("drawn", {}))
        for source, order_state in zip(self._sources, state.get("lanes", ()), strict=False):
            source.row_order.restore(order_state)

    def _source_of_draw(self, cursor: int) -> tuple[int, int]:
        """(source, number of the draw within it): each epoch visits a source once for each of its rows."""
        epoch, place = divmod(cursor, self.size)
        if len(self._sources) == 1:
            return 0, cursor
        if self._epoch is None or self._epoch[0] != epoch:
            sizes = [source.rows for source in self._sources]
            order = np.random.default_rng((self._seed, epoch)).permutation(np.repeat(np.arange(len(sizes)), sizes))
            draws = np.zeros(len(order), np.int64)
            for number in range(len(sizes)):
                chosen = order == number
                draws[chosen] = np.arange(int(chosen.sum()))
            self._epoch = (epoch, order, draws)
        number = int(self._epoch[1][place])
        return number, epoch * self._sources[number].rows + int(self._epoch[2][place])


def split(config: TasksConfig, seed: int) -> tuple[TaskSampler, HeldOutTasks]:
    """Sampler of training tasks, and the held-out tasks. Raises ConfigError if no training tasks are left."""
    tasks = _with_unique_ids([source.load() for source in config.sources])
    loaded = [LoadedSource(each, source.feature) for each, source in zip(tasks, config.sources, strict=True)]
    total = sum(map(len, tasks))
    count = count_held_out(config.held_out, total) if loaded and config.eval is None else 0
    own, rows = hold_out(loaded, count, config.split_seed)
    held_out = {"": own} if loaded and config.eval is None else _eval_tasks(config)
    if loaded and not len(rows):
        raise ConfigError(
            f"tasks.train has {counted(total, 'task')}; {config.held_out} held out leave none to train on.",
            "Set tasks.held_out lower, leave it out for a tenth of the tasks, or give tasks.eval.",
        )
    return task_sampler(loaded, rows, config.order, held_out, seed), held_out


def count_held_out(held_out: int | None, total: int) -> int:
    """Number of tasks to hold out of `total`: `held_out`, or if that is not set, a tenth, at most 100; never all."""
    return held_out if held_out is not None else min(DEFAULT_HELD_OUT, -(-total // 10), max(0, total - 1))


def hold_out(loaded: Sequence[LoadedSource], count: int, seed: int) -> tuple[tuple[Task, ...], np.ndarray]:
    """`count` tasks drawn from those of all sources, and the rows of all other tasks in their order."""
    tasks = _joined([source.tasks for source in loaded])
    shuffled = np.random.default_rng(seed).permutation(len(tasks))
    return tuple(tasks[int(row)] for row in shuffled[:count]), np.sort(shuffled[count:])


def task_sampler(
    loaded: Sequence[LoadedSource], rows: np.ndarray, order: OrderConfig, held_out: HeldOutTasks, seed: int
) -> SourceSampler:
    """Sampler of the tasks at these rows of all sources."""
    begins = np.cumsum([0, *(len(source.tasks) for source in loaded)])
    sources = []
    for number, source in enumerate(loaded):
        own = rows[(rows >= begins[number]) & (rows < begins[number + 1])] - begins[number]
        if len(own):
            row_order = order.row_order(own, source, (seed, number) if number else (seed,))
            sources.append(SampledSource(source.tasks, row_order, len(own)))
    return SourceSampler(sources, held_out, seed)


def training_tasks(config: TasksConfig) -> Sequence[Task]:
    """The tasks of all sources of `train`, those of held-out rows included."""
    return _joined(_with_unique_ids([source.load() for source in config.sources]))


def _joined(loaded: Sequence[Sequence[Task]]) -> Sequence[Task]:
    """The tasks of several sources as one sequence."""
    begins = np.cumsum([0, *map(len, loaded)])

    def task_at(row: int) -> Task:
        number = int(np.searchsorted(begins, row, side="right")) - 1
        return loaded[number][row - int(begins[number])]

    return LazySequence(int(begins[-1]), task_at)


def _with_unique_ids(loaded: Sequence[Sequence[Task]]) -> list[Sequence[Task]]:
    """Prefix the ids of a source with its number if an earlier source uses the same ids."""
    unique: list[Sequence[Task]] = []
    seen: set[str] = set()
    for number, tasks in enumerate(loaded, 1):
        first = tasks[0].id if len(tasks) else ""
        unique.append(_with_id_prefix(tasks, number) if first in seen else tasks)
        seen.add(first)
    return unique


def _with_id_prefix(tasks: Sequence[Task], number: int) -> Sequence[Task]:
    return LazySequence(len(tasks), lambda index: replace(tasks[index], id=f"{number}/{tasks[index].id}"))


def _eval_tasks(config: TasksConfig) -> dict[str, tuple[Task, ...]]:
    if config.eval is None:
        return {}
    named = config.eval if isinstance(config.eval, dict) else {"": config.eval}
    loaded = {name: source.load() for name, source in named.items()}
    count = DEFAULT_HELD_OUT if config.held_out is None else config.held_out
    return {name: tuple(tasks[: count or len(tasks)]) for name, tasks in loaded.items()}
