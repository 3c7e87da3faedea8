"""Sources of tasks: the table of all sources, and the sources that generate tasks.

Each source is a settings class. `load` returns a sequence of tasks, the same in every run; `demonstrations` returns
replies to learn. Rows of data are in `row_sources.py`, held-out tasks in `tasks.py`, and the order in `ordering.py`.

Example: Addition().load()[0].answer == "20"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Discriminator, Field, Tag

from tinsmith.errors import ConfigError
from tinsmith.rl.data.row_mapping import LazySequence, RowMapping, fill_template, user_task
from tinsmith.rl.data.row_sources import Files, Hub, Jsonl, LearnFrom, Sql
from tinsmith.rl.types import Demonstration, Message, Task
from tinsmith.settings import SEVERAL_TAG, SINGLE_TAG, Settings, changed_keys, did_you_mean


class GeneratedSource(Settings):
    """Base of sources that generate tasks. A demonstration is the answer of a task."""

    def load(self) -> Sequence[Task]:
        """The same tasks in every run."""
        raise NotImplementedError

    def demonstrations(self, learn: LearnFrom) -> Sequence[Demonstration]:
        """Each task with its answer as the reply."""
        tasks = self.load()

        def make(index: int) -> Demonstration:
            task = tasks[index]
            if learn == "text":
                text = f"{task.messages[-1].content}\n\n{task.answer}"
                return Demonstration(id=task.id, messages=(Message(role="assistant", content=text),))
            return Demonstration(id=task.id, messages=(*task.messages, Message(role="assistant", content=task.answer)))

        return LazySequence(len(tasks), make)

    def feature(self, key: str) -> np.ndarray:
        """There are none."""
        raise ConfigError(f"These tasks have no field {key!r}.", "Take a source of rows, or leave out tasks.order.by.")


class Addition(GeneratedSource):
    """Sums of two numbers; built in, so that a first run needs no data."""

    type: Literal["addition"] = "addition"
    low: int = Field(default=10, ge=0)
    """Smallest number to add."""
    high: int = 99
    """Largest number to add."""
    prompt: str = "What is {a} + {b}? Answer with the number only."
    """Prompt of each pair; {a} and {b} are the numbers."""

    def load(self) -> Sequence[Task]:
        """Every ordered pair once."""
        span = self.high - self.low + 1
        if span < 1:
            raise ConfigError(f"addition: high {self.high} is below low {self.low}.", "Swap them.")

        def make(index: int) -> Task:
            a, b = self.low + index // span, self.low + index % span
            return user_task(f"addition/{index}", fill_template(self.prompt, {"a": a, "b": b}, "addition"), str(a + b))

        return LazySequence(span * span, make)


class Largest(GeneratedSource):
    """The largest of four different two-digit numbers; built in. Guessing one of the four is right one time in four."""

    type: Literal["largest"] = "largest"
    size: int = Field(default=10_000, ge=1)
    """How many tasks."""
    seed: int = 0
    """Which tasks."""
    prompt: str = "Which is the largest of {a}, {b}, {c} and {d}? Answer with the number only."
    """Prompt of each four; {a} to {d} are the numbers."""

    def load(self) -> Sequence[Task]:
        """Task i is drawn from (seed, i) alone."""

        def make(index: int) -> Task:
            a, b, c, d = Random(f"largest/{self.seed}/{index}").sample(range(10, 100), 4)
            question = fill_template(self.prompt, {"a": a, "b": b, "c": c, "d": d}, "largest")
            return user_task(f"largest/{index}", question, str(max(a, b, c, d)))

        return LazySequence(self.size, make)


class ReasoningGym(GeneratedSource):
    """A dataset of reasoning-gym, generated here; its own scorer is the reward `reasoning_gym`."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    """Its name, as basic_arithmetic or countdown."""
    size: int = Field(default=10_000, ge=1)
    """How many tasks."""
    seed: int = 0
    """Which tasks."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The dataset's own options, as {max_terms: 3}."""
    prompt: str = "{question}"
    """Wrapped around each question."""

    def load(self) -> Sequence[Task]:
        """Task i is the dataset's entry i, kept in `extra` for its scorer."""
        from reasoning_gym.factory import DATASETS, create_dataset

        if self.dataset not in DATASETS:
            cure = did_you_mean(self.dataset, DATASETS) or f"It has {len(DATASETS)}, as basic_arithmetic."
            raise ConfigError(f"reasoning-gym has no dataset '{self.dataset}'.", cure)
        try:
            entries = create_dataset(self.dataset, seed=self.seed, size=self.size, **self.config)
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(f"reasoning-gym's '{self.dataset}' refuses its config: {error}.") from error

        def make(index: int) -> Task:
            entry = dict(entries[index])
            question = fill_template(self.prompt, {"question": entry["question"]}, self.dataset)
            answer = "" if entry["answer"] is None else str(entry["answer"])
            return replace(user_task(f"{self.dataset}/{index}", question, answer), extra=entry)

        return LazySequence(self.size, make)


Source = Annotated[
    Addition | Largest | ReasoningGym | Jsonl | Files | Hub | Sql,
    Field(discriminator="type"),
]


def _count(given: Any) -> str:
    return SEVERAL_TAG if isinstance(given, list | tuple) else SINGLE_TAG


def _named(given: Any) -> str:
    return SEVERAL_TAG if isinstance(given, dict) and not isinstance(given.get("type"), str) else SINGLE_TAG


Sources = Annotated[
    Annotated[Source, Tag(SINGLE_TAG)] | Annotated[tuple[Source, ...], Tag(SEVERAL_TAG)],
    Discriminator(_count),
]
"""One source, or a list of them."""

NamedSources = Annotated[
    Annotated[Source, Tag(SINGLE_TAG)] | Annotated[dict[str, Source], Tag(SEVERAL_TAG)],
    Discriminator(_named),
]
"""One source, or several by name."""


def as_tuple(sources: Source | tuple[Source, ...] | None) -> tuple[Source, ...]:
    """As a tuple, whatever was given."""
    if sources is None:
        return ()
    return sources if isinstance(sources, tuple) else (sources,)


def reject_fields(sources: Iterable[Source], names: Sequence[str], other: str) -> None:
    """For a check of a settings class: raises ValueError if a source of rows sets a key that `other` reads."""
    for source in sources:
        if isinstance(source, RowMapping) and (given := [name for name in names if name in changed_keys(source)]):
            raise ValueError(f"{given[0]} is read of {other} alone; leave it out here")
