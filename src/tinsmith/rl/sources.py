"""Where tasks come from. Each source is a settings class whose `load` gives a sequence of tasks, the same in every run.

Leaves out: which tasks are held out and in what order the others come (`tasks.py`). Relative paths are relative to
where the command runs.

Example: Jsonl(type="jsonl", path="gsm8k.jsonl", answer_after="####").load()[0].answer == "72"
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, overload

from pydantic import Field

from tinsmith.errors import ConfigError
from tinsmith.rl.types import Message, Task
from tinsmith.settings import Settings


class Indexed(Sequence[Task]):
    """Tasks made when asked for: `make(i)` for 0 <= i < `length`."""

    def __init__(self, length: int, make: Callable[[int], Task]) -> None:
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self._make(one) for one in range(*index.indices(self._length))]
        return self._make(range(self._length)[index])


def ask(task_id: str, question: str, answer: str) -> Task:
    """A task of one user message."""
    return Task(id=task_id, messages=(Message(role="user", content=question),), answer=answer)


def fill(template: str, values: Mapping[str, Any], place: str) -> str:
    """`template` with its {fields} put in. Raises ConfigError that names the place and the fields it has."""
    try:
        return template.format_map(values)
    except (KeyError, IndexError, ValueError) as error:
        known = ", ".join(sorted(values))
        raise ConfigError(f"{place}: {template!r} cannot be filled: {error}.", f"Its fields are: {known}.") from error


class Addition(Settings):
    """Sums of two numbers; built in, so that a first run needs no data."""

    type: Literal["addition"] = "addition"
    low: int = Field(default=10, ge=0)
    """Smallest number to add."""
    high: int = 99
    """Largest number to add."""
    prompt: str = "What is {a} + {b}? Answer with the number only."
    """Asked for each pair; {a} and {b} are the numbers."""

    def load(self) -> Sequence[Task]:
        """Every ordered pair once."""
        span = self.high - self.low + 1
        if span < 1:
            raise ConfigError(f"addition: high {self.high} is below low {self.low}.", "Swap them.")

        def make(index: int) -> Task:
            a, b = self.low + index // span, self.low + index % span
            return ask(f"addition/{index}", fill(self.prompt, {"a": a, "b": b}, "addition"), str(a + b))

        return Indexed(span * span, make)


class Largest(Settings):
    """The largest of four different two-digit numbers; built in. Guessing one of the four is right one time in four."""

    type: Literal["largest"] = "largest"
    size: int = Field(default=10_000, ge=1)
    """How many tasks."""
    seed: int = 0
    """Which tasks."""
    prompt: str = "Which is the largest of {a}, {b}, {c} and {d}? Answer with the number only."
    """Asked for each four; {a} to {d} are the numbers."""

    def load(self) -> Sequence[Task]:
        """Task i is drawn from (seed, i) alone."""

        def make(index: int) -> Task:
            a, b, c, d = Random(f"largest/{self.seed}/{index}").sample(range(10, 100), 4)
            question = fill(self.prompt, {"a": a, "b": b, "c": c, "d": d}, "largest")
            return ask(f"largest/{index}", question, str(max(a, b, c, d)))

        return Indexed(self.size, make)


class ReasoningGym(Settings):
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
            near = get_close_matches(self.dataset, DATASETS, n=1)
            cure = f"Did you mean '{near[0]}'?" if near else f"It has {len(DATASETS)}, as basic_arithmetic."
            raise ConfigError(f"reasoning-gym has no dataset '{self.dataset}'.", cure)
        try:
            entries = create_dataset(self.dataset, seed=self.seed, size=self.size, **self.config)
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(f"reasoning-gym's '{self.dataset}' refuses its config: {error}.") from error

        def make(index: int) -> Task:
            entry = dict(entries[index])
            question = fill(self.prompt, {"question": entry["question"]}, self.dataset)
            answer = "" if entry["answer"] is None else str(entry["answer"])
            return replace(ask(f"{self.dataset}/{index}", question, answer), extra=entry)

        return Indexed(self.size, make)


class Fields(Settings):
    """How a row of data becomes a task."""

    prompt: str = "{question}"
    """Fields of the row in braces; a single field that holds a list of {role, content} is a chat as it stands."""
    answer: str = "{answer}"
    """Fields of the row in braces; empty where the rows have no answer."""
    answer_after: str = ""
    """Only what follows the last such mark is the answer, as '####' in GSM8K."""

    def task(self, task_id: str, row: Mapping[str, Any]) -> Task:
        """Raises ConfigError that names the row and its fields."""
        answer = fill(self.answer, row, task_id)
        if self.answer_after:
            answer = answer.rpartition(self.answer_after)[2]
        chat = row.get(self.prompt.strip("{}"))
        if not isinstance(chat, list):
            return ask(task_id, fill(self.prompt, row, task_id), answer.strip())
        try:
            messages = tuple(Message(role=str(one["role"]), content=str(one["content"])) for one in chat)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{task_id}: '{self.prompt}' is no chat.", "Each message is {role, content}.") from error
        return Task(id=task_id, messages=messages, answer=answer.strip())


class Jsonl(Fields):
    """A file with a JSON object on each line."""

    type: Literal["jsonl"] = "jsonl"
    path: str
    """The file."""

    def load(self) -> Sequence[Task]:
        """The rows in their order; blank lines are passed over."""
        file = Path(self.path).expanduser()
        if not file.is_file():
            raise ConfigError(f"There is no task file {file}.", "Check tasks' path; it is relative to where you are.")
        with file.open(encoding="utf-8") as lines:
            return [
                self.task(f"{file.stem}/{number}", row)
                for number, row in enumerate(_objects(file, (line for line in lines if line.strip())))
            ]


class Hub(Fields):
    """A dataset of the Hugging Face hub, or a local folder in its layout."""

    type: Literal["hub"] = "hub"
    name: str
    """As openai/gsm8k, or a folder."""
    subset: str | None = None
    """As main."""
    split: str = "train"
    """As train or test."""

    def load(self) -> Sequence[Task]:
        """The split's rows in their order."""
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise ConfigError(
                "tasks from the hub need the package datasets.", "pip install 'tinsmith[hub]'."
            ) from error
        try:
            rows = load_dataset(self.name, self.subset, split=self.split)
        except (OSError, ValueError) as error:
            raise ConfigError(f"The dataset {self.name} cannot be loaded: {error}") from error
        return Indexed(len(rows), lambda index: self.task(f"{self.name}/{index}", rows[index]))


Source = Annotated[Addition | Largest | ReasoningGym | Jsonl | Hub, Field(discriminator="type")]


def _objects(file: Path, lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{file}, object {number}: {error}.", "Write one JSON object on each line.") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{file}, object {number} is no JSON object.", "Write one JSON object on each line.")
        yield row
