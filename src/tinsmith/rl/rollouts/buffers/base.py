"""Protocol of buffers: batches on their way from sampling to training, and notes of the two sides.

Which batch is trained on next is in `replay.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from tinsmith.rl.rollouts.producer import Batch


class Buffer(Protocol):
    """Batches by number and notes by name. Writes are durable when the call returns, if the buffer is."""

    @property
    def durable(self) -> bool:
        """Whether the buffer outlives the process and other processes can open it."""
        ...

    async def put(self, batch: Batch) -> None:
        """Add a batch; replaces a batch of the same number."""
        ...

    async def numbers(self) -> Collection[int]:
        """Numbers of the batches in the buffer."""
        ...

    async def get(self, number: int) -> Batch:
        """The batch of that number, which must be in the buffer."""
        ...

    async def drop(self, numbers: Collection[int]) -> None:
        """Delete batches; unknown numbers are ignored."""
        ...

    async def note(self, name: str, text: str) -> None:
        """Write a note; replaces a note of the same name."""
        ...

    async def notes(self) -> Mapping[str, str]:
        """All notes by name."""
        ...

    async def close(self) -> None:
        """Close files and connections."""
        ...
