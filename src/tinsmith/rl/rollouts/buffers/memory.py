"""Buffer in memory. A resumed run restores the waiting batches from its saved state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from typing_extensions import override

from tinsmith.rl.rollouts.buffers.base import Buffer, Record
from tinsmith.rl.rollouts.buffers.replay import BufferSettings
from tinsmith.rl.rollouts.progress import Batch


class MemoryConfig(BufferSettings):
    """Batches in memory, for a process that both samples and trains; checkpoints hold the waiting batches."""

    type: Literal["memory"] = "memory"


class MemoryBuffer(Buffer):
    """Buffer in memory."""

    durable = False

    def __init__(self) -> None:
        self._batches: dict[int, Batch] = {}
        self._notes: dict[str, str] = {}
        self._records: dict[str, Record] = {}

    @override
    async def put(self, batch: Batch) -> None:
        self._batches[batch.step] = batch

    @override
    async def numbers(self) -> Collection[int]:
        return self._batches.keys()

    @override
    async def get(self, number: int) -> Batch:
        return self._batches[number]

    @override
    async def drop(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._batches.pop(number, None)

    @override
    async def note(self, name: str, text: str) -> None:
        self._notes[name] = text

    @override
    async def notes(self) -> Mapping[str, str]:
        return dict(self._notes)

    @override
    async def record(self, name: str) -> Record:
        return self._records.get(name, Record())

    @override
    async def replace_record(self, name: str, revision: int, text: str) -> bool:
        if (await self.record(name)).revision != revision:
            return False
        self._records[name] = Record(revision + 1, text)
        return True

    @override
    async def close(self) -> None:
        pass
