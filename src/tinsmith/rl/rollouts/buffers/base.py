"""What a buffer is: where batches wait between who samples and who trains, and where the two leave each other notes.

Leaves out which batch is trained on next (`reader.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from tinsmith.rl.rollouts.producer import Batch


class Buffer(Protocol):
    """Batches by their numbers, and notes by their names. What is put is there for good when the call returns."""

    @property
    def durable(self) -> bool:
        """Whether it outlives the process, and others can open it."""
        ...

    async def put(self, batch: Batch) -> None:
        """One more; a batch of the same number is replaced."""
        ...

    async def numbers(self) -> Collection[int]:
        """Of the batches that are here."""
        ...

    async def get(self, number: int) -> Batch:
        """The batch of a number that is here."""
        ...

    async def drop(self, numbers: Collection[int]) -> None:
        """Those batches are wanted no more; numbers that are not here are passed over."""
        ...

    async def note(self, name: str, text: str) -> None:
        """Leaves a note in place of the one of that name."""
        ...

    async def notes(self) -> Mapping[str, str]:
        """All of them."""
        ...

    async def close(self) -> None:
        """Lets go of files and connections."""
        ...
