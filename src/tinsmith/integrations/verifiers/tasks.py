"""Rows of a verifiers taskset as Tasks, and back.

A Task carries the row's data in `extra`, so that checkpoints, buffers and other processes hold it; the verifiers task
is made from it again for each rollout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

from tinsmith.errors import ConfigError
from tinsmith.rl.data.images import read_parts
from tinsmith.rl.data.row_mapping import LazySequence
from tinsmith.rl.types import Message, Task

if TYPE_CHECKING:
    import verifiers.v1 as vf

ROW = "verifiers"
"""Key of a row's data in Task.extra."""

DATA_ROLE = "data"
"""Role of the message that shows the row's own fields. The policy does not see it; it tells equal prompts apart."""


class _Rows(Sequence["vf.Task"]):
    """The first `length` tasks of an endless iterator, read when they are needed."""

    def __init__(self, tasks: Iterator[vf.Task], length: int) -> None:
        self._tasks, self._length = tasks, length
        self._read: list[vf.Task] = []

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> vf.Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[vf.Task]: ...
    def __getitem__(self, index: int | slice) -> vf.Task | Sequence[vf.Task]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._length))]
        position = range(self._length)[index]
        while len(self._read) <= position:
            self._read.append(next(self._tasks))
        return self._read[position]


def rows(taskset: vf.Taskset, size: int, check: Callable[[vf.Task], None]) -> Sequence[Task]:
    """The tasks of a taskset; the first `size` of an infinite one, each read when it is first drawn.

    `check` raises ConfigError for a task that cannot be run. Also raises it if the tasks cannot be loaded.
    """
    name = str(taskset.config.id)
    with _loading(name):
        taken = list(taskset) if taskset.bounded else _Rows(iter(taskset), size)

    def row(index: int) -> Task:
        with _loading(name):
            task = taken[index]
        check(task)
        return task_of(task, name)

    return LazySequence(len(taken), row)


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Name the taskset whose data cannot be had: no network, no file, a package that is missing."""
    try:
        yield
    except (OSError, ImportError, LookupError) as error:
        raise ConfigError(
            f"{name}: its tasks cannot be loaded: {type(error).__name__}: {error}",
            "Make available the data, files and packages that the taskset loads.",
        ) from error


def task_of(task: vf.Task, name: str) -> Task:
    """A row as a Task. Raises ConfigError if its data cannot be stored."""
    fields = type(task.data).model_fields
    if hidden := [key for key, field in fields.items() if field.exclude]:
        raise ConfigError(f"{name}: the fields {', '.join(hidden)} are not serialized.", "Remove exclude=True.")
    whole = task.data.model_dump(mode="json")
    # Only whole fields are left out: within a field, a default such as a message's role decides its type.
    data = {key: whole[key] for key in task.data.model_dump(mode="json", exclude_defaults=True)}
    prompt = task.data.prompt
    if isinstance(prompt, str):
        messages = [Message(role="user", content=prompt)]
    else:
        messages = [_message(message, f"{name}/{task.data.idx}") for message in prompt or ()]
    if task.data.system_prompt:
        messages.insert(0, Message(role="system", content=task.data.system_prompt))
    if own := own_fields(task.data):
        messages.append(Message(role=DATA_ROLE, content=json.dumps(own, sort_keys=True, ensure_ascii=False)))
    return Task(
        id=f"{name}/{task.data.idx}",
        messages=tuple(messages),
        answer=str(data.get("answer") or ""),
        extra={ROW: data},
    )


def _message(message: Any, place: str) -> Message:
    """A message of a prompt with its images. Raises ConfigError for an image that is not a data URL."""
    from verifiers.v1.types import content_text

    parts = [part for part in message.content or () if not isinstance(part, str)]
    if not any(part.type == "image_url" for part in parts):
        return Message(role=message.role, content=content_text(message.content))
    text, images = read_parts([part.model_dump() for part in parts], iter(()), place)
    return Message(role=message.role, content=text, images=images)


def own_fields(data: vf.TaskData) -> dict[str, Any]:
    """The fields that the taskset adds to those of every row, in JSON's types."""
    from verifiers.v1.task import TaskData

    return {key: value for key, value in data.model_dump(mode="json").items() if key not in TaskData.model_fields}


def verifiers_task(task: Task, taskset: vf.Taskset) -> vf.Task:
    """The verifiers task of a row."""
    kind = type(taskset).task_type()
    return kind(kind.data_type().model_validate(task.extra[ROW]), taskset.config.task)
