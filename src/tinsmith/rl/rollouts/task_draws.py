"""The tasks of the batches: drawn by the only process that samples, or from a record that several processes share.

The record of tasks is in the buffer. It has the position in the training tasks, the number of the next batch, and the
batches that were begun and are not in the buffer yet, with their tasks and the name of the process that samples them. A
process draws by replacing the record, so no task is drawn twice in an epoch and none is skipped, whichever process is
killed at whichever instant: its batches stay its own, and the same name continues them on any machine.
"""

from __future__ import annotations

import asyncio
import copy
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Any, Protocol

from pydantic import Field
from typing_extensions import override

from tinsmith.errors import TinsmithError
from tinsmith.rl.data.tasks import TaskSampler
from tinsmith.rl.policy.sampling import request_seed
from tinsmith.rl.rollouts import coordination
from tinsmith.rl.rollouts.buffers.base import Buffer
from tinsmith.rl.rollouts.progress import Batch, BatchInProgress
from tinsmith.rl.types import Group
from tinsmith.settings import Settings

RECORD = "tasks"
"""Name of the record."""
_AGAIN_S = 0.01
"""Time until the next attempt to replace the record."""

Put = Callable[[Batch], Awaitable[None]]
"""Puts a batch into the buffer."""


class NameTakenError(TinsmithError):
    """Another process samples under the name of this one."""


class TaskDraws(Protocol):
    """Draws tasks for batches, which are numbered from 1."""

    async def upcoming(self, after: int) -> int:
        """Number of the next batch to start. `after`: the last one that this process has started."""
        ...

    async def begin(self, number: int) -> BatchInProgress | None:
        """Batch `number` with its tasks. None if another process has begun it."""
        ...

    async def add(self, batch: BatchInProgress, *stream: int) -> None:
        """Add other tasks to a batch. `stream` separates their seeds from those of its first tasks."""
        ...

    async def finish(self, batch: Batch, put: Put) -> int:
        """Put a batch into the buffer, and note that it is there. Returns the number up to which all batches are."""
        ...


class LocalDraws(TaskDraws):
    """Draws of the only process that samples."""

    def __init__(self, task_sampler: TaskSampler, groups: int, seed: int) -> None:
        """`groups`: tasks of a batch. `seed`: that of the run."""
        self._task_sampler, self._groups, self._seed = task_sampler, groups, seed

    @override
    async def upcoming(self, after: int) -> int:
        return after + 1

    @override
    async def begin(self, number: int) -> BatchInProgress | None:
        batch = BatchInProgress(step=number)
        await self.add(batch)
        return batch

    @override
    async def add(self, batch: BatchInProgress, *stream: int) -> None:
        _draw(self._task_sampler, batch, self._groups, self._seed, *stream)

    @override
    async def finish(self, batch: Batch, put: Put) -> int:
        await put(batch)
        return batch.step


class OpenBatch(Settings):
    """A batch that a process has begun."""

    sampler: str
    """Name of the process."""
    batch: BatchInProgress
    """Its tasks, without groups."""


class TaskRecord(Settings):
    """The record of tasks."""

    next: int = 1
    """Number of the next batch that no process has begun."""
    cursor: int = 0
    """Training tasks drawn."""
    order: dict[str, Any] = Field(default_factory=dict)
    """State of the task order."""
    open: dict[int, OpenBatch] = Field(default_factory=dict)
    """Batches by number that were begun and are not in the buffer, or not noted as such."""
    owners: dict[str, str] = Field(default_factory=dict)
    """Processes that sample: a random identity by name."""

    @property
    def done(self) -> int:
        """This batch and all earlier ones have been put into the buffer."""
        return min(self.open, default=self.next) - 1

    def is_closed(self, number: int) -> bool:
        """Whether a batch is in the buffer, or was, and will not be put there again."""
        return number < self.next and number not in self.open


async def read_tasks(buffer: Buffer) -> TaskRecord | None:
    """The record of tasks; None before the first process that samples has written it."""
    record = await buffer.record(RECORD)
    return TaskRecord.model_validate_json(record.text) if record.text else None


class SharedDraws(TaskDraws):
    """Draws of one of several processes that sample for a run, from the record in the buffer.

    The task sampler only computes: its position and its order are those of the record.
    """

    def __init__(self, buffer: Buffer, task_sampler: TaskSampler, sampler: str, groups: int, seed: int) -> None:
        """`sampler`: name of this process. `groups`: tasks of a batch. `seed`: that of the run."""
        self._buffer, self._task_sampler, self._sampler = buffer, task_sampler, sampler
        self._groups, self._seed, self._identity = groups, seed, uuid.uuid4().hex
        self._first = TaskRecord(order=copy.deepcopy(task_sampler.state))

    async def start(self) -> int:
        """Take over the batches that an earlier process of this name has begun. Returns the number that all are done
        up to."""
        record = await self._replace(
            lambda record: record.model_copy(update={"owners": {**record.owners, self._sampler: self._identity}})
        )
        stored = set(await self._buffer.numbers())
        for number in [number for number in self._own(record) if number in stored]:
            record = await self._close(number, (await self._buffer.get(number)).groups)
        return record.done

    async def end(self) -> None:
        """Give up the name. Batches in flight stay those of this name."""

        def release(record: TaskRecord) -> TaskRecord:
            return record.model_copy(update={"owners": _without(record.owners, self._sampler)})

        await self._change(release)

    @override
    async def upcoming(self, after: int) -> int:
        record = await self._read()
        return min((number for number in self._own(record) if number > after), default=record.next)

    @override
    async def begin(self, number: int) -> BatchInProgress | None:
        record = await self._read()
        if number in self._own(record):
            return replace(record.open[number].batch, began=time.time())  # nothing else refers to its lists
        if self._has_more_than_another(record):
            await asyncio.sleep(2 * coordination.POLL_SECONDS)  # a process with fewer batches is quicker
        begun = BatchInProgress(step=number)

        def draw(record: TaskRecord) -> TaskRecord | None:
            begun.clear()
            return self._drawn(record, begun) if record.next == number else None

        await self._change(draw)
        return begun if begun.tasks else None

    @override
    async def add(self, batch: BatchInProgress, *stream: int) -> None:
        before = replace(batch, tasks=[*batch.tasks], seeds=[*batch.seeds], groups=[*batch.groups])

        def draw(record: TaskRecord) -> TaskRecord:
            batch.tasks, batch.seeds, batch.groups = [*before.tasks], [*before.seeds], [*before.groups]
            return self._drawn(record, batch, *stream)

        await self._change(draw)

    @override
    async def finish(self, batch: Batch, put: Put) -> int:
        self._check_owner(await self._read())
        await put(batch)
        return (await self._close(batch.step, batch.groups)).done

    async def _close(self, number: int, groups: Collection[Group]) -> TaskRecord:
        def close(record: TaskRecord) -> TaskRecord:
            self._task_sampler.restore(record.cursor, record.order)
            self._task_sampler.update(tuple(groups))
            order = self._task_sampler.state
            return record.model_copy(update={"order": order, "open": _without(record.open, number)})

        return await self._change(close)

    def _drawn(self, record: TaskRecord, batch: BatchInProgress, *stream: int) -> TaskRecord:
        """The record after drawing tasks for `batch`, to which they are added."""
        self._task_sampler.restore(record.cursor, record.order)
        _draw(self._task_sampler, batch, self._groups, self._seed, *stream)
        begun = replace(batch, tasks=[*batch.tasks], seeds=[*batch.seeds], groups=[None] * len(batch.tasks))
        return record.model_copy(
            update={
                "next": max(record.next, batch.step + 1),
                "cursor": self._task_sampler.cursor,
                "order": self._task_sampler.state,
                "open": {**record.open, batch.step: OpenBatch(sampler=self._sampler, batch=begun)},
            }
        )

    def _own(self, record: TaskRecord) -> list[int]:
        return sorted(number for number, begun in record.open.items() if begun.sampler == self._sampler)

    def _has_more_than_another(self, record: TaskRecord) -> bool:
        counts = dict.fromkeys(record.owners, 0)
        for begun in record.open.values():
            counts[begun.sampler] = counts.get(begun.sampler, 0) + 1
        return counts.get(self._sampler, 0) > min(counts.values(), default=0)

    async def _read(self) -> TaskRecord:
        return await read_tasks(self._buffer) or self._first

    async def _change(self, change: Callable[[TaskRecord], TaskRecord | None]) -> TaskRecord:
        """Replace the record unless `change` returns None. Raises NameTakenError."""

        def checked(record: TaskRecord) -> TaskRecord | None:
            self._check_owner(record)
            return change(record)

        return await self._replace(checked)

    def _check_owner(self, record: TaskRecord) -> None:
        if record.owners.get(self._sampler) != self._identity:
            name = f"the name {self._sampler}" if self._sampler else "no name"
            raise NameTakenError(
                f"Another process of mode explore with {name} has taken over the batches of this one.",
                "Give each process of mode explore a name of its own, as in sampler=b.",
            )

    async def _replace(self, change: Callable[[TaskRecord], TaskRecord | None]) -> TaskRecord:
        while True:
            stored = await self._buffer.record(RECORD)
            record = TaskRecord.model_validate_json(stored.text) if stored.text else self._first
            if (changed := change(record)) is None:
                return record
            if await self._buffer.replace_record(RECORD, stored.revision, changed.model_dump_json()):
                return changed
            await asyncio.sleep(_AGAIN_S)


def _draw(task_sampler: TaskSampler, batch: BatchInProgress, groups: int, seed: int, *stream: int) -> None:
    tasks = task_sampler.draw(groups)
    seeds = [request_seed(seed, batch.step, group, *stream) for group in range(len(tasks))]
    batch.add(tasks, seeds, task_sampler.cursor)


def _without(values: dict[Any, Any], key: Any) -> dict[Any, Any]:
    return {name: value for name, value in values.items() if name != key}
