"""Batches in memory; a resumed run restores them from its state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from tinsmith.rl.rollouts.buffers.replay import BufferSettings
from tinsmith.rl.rollouts.producer import Batch


class MemoryConfig(BufferSettings):
    """Batches in the process that samples and trains; the run's state holds the waiting ones."""

    type: Literal["memory"] = "memory"


class MemoryBuffer:
    """Implements `base.Buffer`."""

    durable = False

    def __init__(self) -> None:
        self._batches: dict[int, Batch] = {}
        self._notes: dict[str, str] = {}

    async def put(self, batch: Batch) -> None:
        """Kept."""
        self._batches[batch.step] = batch

    async def numbers(self) -> Collection[int]:
        """Of the batches that are here."""
        return self._batches.keys()

    async def get(self, number: int) -> Batch:
        """The batch itself."""
        return self._batches[number]

    async def drop(self, numbers: Collection[int]) -> None:
        """Forgotten."""
        for number in numbers:
            self._batches.pop(number, None)

    async def note(self, name: str, text: str) -> None:
        """Kept."""
        self._notes[name] = text

    async def notes(self) -> Mapping[str, str]:
        """All of them."""
        return dict(self._notes)

    async def close(self) -> None:
        """Nothing to let go of."""
