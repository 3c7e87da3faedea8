"""Buffer protocol: batches that wait for training, notes that the processes of a run exchange, and shared records.

A note has one writer. A record has several: it is replaced only by a process that has read its newest revision.
`replay.py` selects the next batch to train on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from tinsmith.rl.rollouts.progress import Batch


@dataclass(frozen=True, slots=True)
class Record:
    """A text that several processes replace.

    Example: Record(3, '{"next": 4}')
    """

    revision: int = 0
    """Number of replacements; 0: there is no text yet."""
    text: str = ""


class Buffer(Protocol):
    """Batches by number, notes and records by name. In a durable buffer, a write is durable when the call returns."""

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

    async def record(self, name: str) -> Record:
        """The newest revision of a record."""
        ...

    async def replace_record(self, name: str, revision: int, text: str) -> bool:
        """Replace a record whose newest revision is `revision`. False if another process has replaced it before."""
        ...

    async def close(self) -> None:
        """Close files and connections."""
        ...
