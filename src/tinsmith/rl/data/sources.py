"""Sources of tasks: the union of all source settings, and the sources that generate tasks.

Each source is a settings class. `load` returns its tasks, the same in every run; `demonstrations` returns replies to
train on. Sources of rows are in `row_sources.py`, held-out tasks in `tasks.py`, the order of tasks in `ordering.py`.

Example: Addition().load()[0].answer == "20"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from random import Random
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Discriminator, Field, Tag
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.rl.data.row_mapping import LazySequence, RowMapping, fill_template, user_task
from tinsmith.rl.data.row_sources import Files, Hub, InlineRows, Jsonl, LearnFrom, Sql
from tinsmith.rl.plugins import CustomPart, Kind, path_text
from tinsmith.rl.types import Demonstration, Message, Task
from tinsmith.settings import SEVERAL_TAG, SINGLE_TAG, Settings, changed_keys, did_you_mean


class GeneratedSource(Settings):
    """Base of the sources that generate tasks. The demonstration of a task is its answer."""

    def load(self) -> Sequence[Task]:
        """All tasks, the same in every run."""
        raise NotImplementedError

    def demonstrations(self, learn: LearnFrom) -> Sequence[Demonstration]:
        """Each task with its answer as the reply; with `learn` text, prompt and answer as plain text."""
        tasks = self.load()

        def make(index: int) -> Demonstration:
            task = tasks[index]
            if learn == "text":
                text = f"{task.messages[-1].content}\n\n{task.answer}"
                return Demonstration(id=task.id, messages=(Message(role="assistant", content=text),))
            return Demonstration(id=task.id, messages=(*task.messages, Message(role="assistant", content=task.answer)))

        return LazySequence(len(tasks), make)

    def feature(self, key: str) -> np.ndarray:
        """Raises ConfigError: generated tasks have no fields."""
        raise ConfigError(f"Generated tasks have no field {key!r}.", "Use a source of rows, or remove tasks.order.by.")


class Addition(GeneratedSource):
    """Sums of two numbers; built in, so that a first run needs no data files."""

    type: Literal["addition"] = "addition"
    low: int = Field(default=10, ge=0)
    """Smallest number to add."""
    high: int = 99
    """Largest number to add."""
    prompt: str = "What is {a} + {b}? Answer with the number only."
    """Template of the prompt; {a} and {b} are the numbers."""

    @override
    def load(self) -> Sequence[Task]:
        count = self.high - self.low + 1
        if count < 1:
            raise ConfigError(f"addition: high {self.high} is below low {self.low}.", "Swap high and low.")

        def make(index: int) -> Task:
            a, b = self.low + index // count, self.low + index % count
            return user_task(f"addition/{index}", fill_template(self.prompt, {"a": a, "b": b}, "addition"), str(a + b))

        return LazySequence(count * count, make)


class Largest(GeneratedSource):
    """The largest of four different two-digit numbers; built in. A random choice among the four is correct 25 % of the
    time."""

    type: Literal["largest"] = "largest"
    size: int = Field(default=10_000, ge=1)
    """Number of tasks."""
    seed: int = 0
    """Seed of the generated tasks."""
    prompt: str = "Which is the largest of {a}, {b}, {c} and {d}? Answer with the number only."
    """Template of the prompt; {a}, {b}, {c} and {d} are the numbers."""

    @override
    def load(self) -> Sequence[Task]:
        def make(index: int) -> Task:
            a, b, c, d = Random(f"largest/{self.seed}/{index}").sample(range(10, 100), 4)
            question = fill_template(self.prompt, {"a": a, "b": b, "c": c, "d": d}, "largest")
            return user_task(f"largest/{index}", question, str(max(a, b, c, d)))

        return LazySequence(self.size, make)


class ReasoningGym(GeneratedSource):
    """A generated dataset of reasoning-gym. The reward `reasoning_gym` calls its scorer."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    """Name of the dataset, such as basic_arithmetic or countdown."""
    size: int = Field(default=10_000, ge=1)
    """Number of tasks."""
    seed: int = 0
    """Seed of the generated tasks."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Options of the dataset, such as {max_terms: 3}."""
    prompt: str = "{question}"
    """Template of the prompt; {question} is the question of the entry."""

    @override
    def load(self) -> Sequence[Task]:
        from reasoning_gym.factory import DATASETS, create_dataset

        if self.dataset not in DATASETS:
            cure = (
                did_you_mean(self.dataset, DATASETS) or f"There are {len(DATASETS)} datasets, such as basic_arithmetic."
            )
            raise ConfigError(f"reasoning-gym has no dataset '{self.dataset}'.", cure)
        try:
            entries = create_dataset(self.dataset, seed=self.seed, size=self.size, **self.config)
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(f"The reasoning-gym dataset '{self.dataset}' rejects its config: {error}.") from error

        def make(index: int) -> Task:
            entry = dict(entries[index])
            question = fill_template(self.prompt, {"question": entry["question"]}, self.dataset)
            answer = "" if entry["answer"] is None else str(entry["answer"])
            return replace(
                user_task(f"{self.dataset}/{index}", question, answer), extra=entry
            )  # the scorer reads extra

        return LazySequence(self.size, make)


MAX_TASKS = 1_000_000
"""Most tasks that a function may generate one by one; a sequence may have more."""


class CustomSource(CustomPart, GeneratedSource):
    """User code: a function that returns the tasks, or a GeneratedSource class.

    It returns or generates a Task, or a mapping with the keys `prompt` and `answer`, for each task, the same in every
    run; other keys of a mapping are in the task's `extra`. A sequence that makes its items on access is read so.

    Example: def squares(size=100): return [{"prompt": f"{n} * {n} = ?", "answer": n * n} for n in range(size)]
    """

    kind: ClassVar[Kind] = "source"
    type: Literal["custom"] = "custom"

    @override
    def check_code(self) -> None:
        if self.settings_of(GeneratedSource) is None:
            self.function_of()

    @override
    def load(self) -> Sequence[Task]:
        return self._tasks

    @cached_property
    def _tasks(self) -> Sequence[Task]:
        with self.errors_named():
            if (own := self.settings_of(GeneratedSource)) is not None:
                return own.load()
            returned = self.function_of()[0]()
            if not isinstance(returned, Sequence):
                returned = list(islice(iter(returned), MAX_TASKS + 1))
                if len(returned) > MAX_TASKS:
                    raise self.fault(
                        f"generates more than {MAX_TASKS:,} tasks", "Return a sequence that makes them on access."
                    )
        if not len(returned):
            raise self.fault("returned no tasks", "Return at least one.")
        tasks = LazySequence(len(returned), lambda at: self._task(at, returned[at]))
        _ = tasks[0]
        return tasks

    def _task(self, number: int, entry: Any) -> Task:
        """The task of an entry that the function returned."""
        if isinstance(entry, Task):
            return entry
        if not (isinstance(entry, Mapping) and isinstance(entry.get("prompt"), str)):
            raise self.fault(
                f"returned {entry!r:.80} as its task {number}",
                "Return a tinsmith.Task, or a mapping with the text prompt, and answer.",
            )
        answer = entry.get("answer")
        extra = {str(key): value for key, value in entry.items() if key not in ("prompt", "answer")}
        name = path_text(self.path).rpartition(":")[2]
        return replace(
            user_task(f"{name}/{number}", entry["prompt"], "" if answer is None else str(answer)), extra=extra
        )


Source = Annotated[
    Addition | Largest | ReasoningGym | CustomSource | InlineRows | Jsonl | Files | Hub | Sql,
    Field(discriminator="type"),
]


def _list_tag(value: Any) -> str:
    return SEVERAL_TAG if isinstance(value, list | tuple) else SINGLE_TAG


def _mapping_tag(value: Any) -> str:
    return SEVERAL_TAG if isinstance(value, dict) and not isinstance(value.get("type"), str) else SINGLE_TAG


Sources = Annotated[
    Annotated[Source, Tag(SINGLE_TAG)] | Annotated[tuple[Source, ...], Tag(SEVERAL_TAG)],
    Discriminator(_list_tag),
]
"""A source, or a list of sources."""

NamedSources = Annotated[
    Annotated[Source, Tag(SINGLE_TAG)] | Annotated[dict[str, Source], Tag(SEVERAL_TAG)],
    Discriminator(_mapping_tag),
]
"""A source, or a mapping of names to sources."""


def as_tuple(sources: Source | tuple[Source, ...] | None) -> tuple[Source, ...]:
    """`sources` as a tuple; None is empty."""
    if sources is None:
        return ()
    return sources if isinstance(sources, tuple) else (sources,)


def reject_fields(sources: Iterable[Source], names: Sequence[str], reader: str) -> None:
    """Raises ValueError if a source of rows sets one of the keys `names`, which only apply to `reader`."""
    for source in sources:
        if isinstance(source, RowMapping) and (unused := [name for name in names if name in changed_keys(source)]):
            raise ValueError(f"{unused[0]} applies only to {reader}; remove it here")
