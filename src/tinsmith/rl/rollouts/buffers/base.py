"""Buffer protocol: batches that wait for training, and notes that the sampling and training processes exchange.

`replay.py` selects the next batch to train on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from tinsmith.rl.rollouts.progress import Batch


class Buffer(Protocol):
    """Batches by number and notes by name. In a durable buffer, a write is durable when the call returns."""

    durable: bool
    """Whether the buffer outlives the process and other processes can open it."""

    async def put(self, batch: Batch) -> None:
        """Store a batch under its step number; replaces a batch with the same number."""
        ...

    async def numbers(self) -> Collection[int]:
        """Numbers of the batches in the buffer."""
        ...

    async def get(self, number: int) -> Batch:
        """The batch with `number`, which must be in the buffer."""
        ...

    async def drop(self, numbers: Collection[int]) -> None:
        """Delete batches; numbers that are not in the buffer are ignored."""
        ...

    async def note(self, name: str, text: str) -> None:
        """Store a note; replaces a note with the same name."""
        ...

    async def notes(self) -> Mapping[str, str]:
        """All notes by name."""
        ...

    async def close(self) -> None:
        """Close files and connections."""
        ...
