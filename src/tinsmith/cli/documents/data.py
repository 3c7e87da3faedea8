"""The data of a run, counted, with its first rows: for `tinsmith check`, as text and in JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tinsmith.errors import Unreachable
from tinsmith.plurals import counted

if TYPE_CHECKING:
    from tinsmith.rl.config import RunConfig
    from tinsmith.rl.run.parts import RunData
    from tinsmith.rl.types import Message

EXAMPLES = 3
"""Prompts to show of each kind of data."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows to train on.

    Example: Rows(900, per_step=16)
    """

    count: int
    per_step: int

    @property
    def steps_per_epoch(self) -> float:
        """Steps in which each row is used once."""
        return self.count / self.per_step

    @property
    def document(self) -> dict[str, Any]:
        """What JSON says of them."""
        return {**asdict(self), "steps_per_epoch": self.steps_per_epoch}


@dataclass(frozen=True, slots=True)
class ExampleRow:
    """A row that a run reads.

    Example: ExampleRow("rows/0", "What is 39 + 13?", "52")
    """

    id: str
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageData:
    """The data of a stage, or of a run without stages."""

    stage: str = ""
    """Name of the stage; empty for a run without stages."""
    tasks: Rows | None = None
    """None if nothing is sampled to train on, as `demonstrations` without any."""
    demonstrations: Rows | None = None
    held_out: Mapping[str, int] = field(default_factory=dict)
    """Number of held-out tasks by name, which is empty where there is one source."""
    examples: Sequence[ExampleRow] = ()
    """The first rows; none where an earlier stage has the same data."""
    not_opened: Sequence[str] = ()
    """Why data was not opened."""

    @property
    def lines(self) -> Iterator[str]:
        """Lines for people."""
        prefix = f"stage {self.stage}: " if self.stage else ""
        yield from (f"not opened: {text}" for text in self.not_opened)
        if self.demonstrations is not None:
            yield f"{prefix}data: {counted(self.demonstrations.count, 'demonstration')}, {_epoch(self.demonstrations)}"
        names = [f"{name} {count:,}" if name else f"{count:,}" for name, count in self.held_out.items()]
        evaluated = f"{', '.join(names)} held out" if any(self.held_out.values()) else "none held out"
        if self.tasks is not None:
            yield f"{prefix}data: {counted(self.tasks.count, 'task')} to train on, {evaluated}; {_epoch(self.tasks)}"
        elif any(self.held_out.values()):
            yield f"{prefix}data: {evaluated}"
        yield from (f"  {row.id}: {_short(row.prompt)} -> {_short(row.answer)}" for row in self.examples)

    @property
    def document(self) -> dict[str, Any]:
        """What JSON says of it."""
        return {
            "stage": self.stage,
            "tasks": self.tasks and self.tasks.document,
            "demonstrations": self.demonstrations and self.demonstrations.document,
            "held_out": sum(self.held_out.values()),
            "examples": [asdict(row) for row in self.examples],
            "not_opened": list(self.not_opened),
        }


def read_data(run: RunConfig) -> Iterator[StageData]:
    """The data of each stage. Raises ConfigError for data that the run cannot use."""
    from tinsmith.rl.run.parts import RunData, resolve_steps

    read: list[tuple[tuple[Any, ...], RunData]] = []
    for stage in run.runs:
        name = stage.name.removeprefix(run.name).strip() if run.stages else ""
        key = (stage.tasks, stage.environments, stage.demonstrations, stage.algorithm.type, stage.mode, stage.seed)
        earlier = next((data for settings, data in read if settings == key), None)
        try:
            data = earlier or RunData(stage)
            resolve_steps(stage, data)
            part = _stage_data(stage, name, data, with_examples=earlier is None)
        except Unreachable as error:
            part = StageData(stage=name, not_opened=_unopened(stage, error))
        else:
            read.append((key, data))
        yield part


def _stage_data(stage: RunConfig, name: str, data: RunData, *, with_examples: bool) -> StageData:
    sampler, held_out = data.tasks
    demonstrations = None
    if stage.demonstrations is not None:
        alone = not stage.uses_rollouts
        per_step = stage.demonstrations.count(stage.groups_per_step, stage.group_size, alone=alone)
        demonstrations = Rows(sum(map(len, data.demonstrations)), per_step)
    return StageData(
        stage=name,
        tasks=Rows(sampler.size, stage.groups_per_step) if stage.samples and sampler.size else None,
        demonstrations=demonstrations,
        held_out={name: len(tasks) for name, tasks in held_out.items()},
        examples=tuple(_examples(stage, data)) if with_examples else (),
    )


def _unopened(stage: RunConfig, error: Unreachable) -> list[str]:
    """Why data was not opened. Raises ConfigError for other data of the stage that cannot be used."""
    from tinsmith.rl.data.sources import as_tuple

    named = stage.tasks.eval
    evaluated = named.values() if isinstance(named, dict) else as_tuple(named)
    loads = [source.load for source in (*stage.tasks.sources, *evaluated)]
    texts = {str(error): None}
    for load in (*loads, stage.demonstrations.load) if stage.demonstrations else loads:
        try:
            load()
        except Unreachable as other:
            texts[str(other)] = None
    return list(texts)


def _examples(stage: RunConfig, data: RunData) -> Iterator[ExampleRow]:
    """The first rows to train on, or to evaluate if none are sampled. Raises ConfigError if all are held out."""
    sampler, held_out = data.tasks
    for demonstration in [each for part in data.demonstrations for each in part[:EXAMPLES]][:EXAMPLES]:
        prompt = _prompt(demonstration.messages[:-1])
        yield ExampleRow(demonstration.id, prompt, demonstration.messages[-1].content)
    tasks = sampler.draw(EXAMPLES) if stage.samples and sampler.size else []
    for task in tasks or [task for part in held_out.values() for task in part[:EXAMPLES]][:EXAMPLES]:
        yield ExampleRow(task.id, _prompt(task.messages), task.answer)


def _prompt(messages: Sequence[Message]) -> str:
    return next((message.content for message in reversed(messages) if message.role == "user"), "")


def _epoch(rows: Rows) -> str:
    return f"{rows.steps_per_epoch:.4g} steps per epoch, of {rows.per_step:,} each"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
