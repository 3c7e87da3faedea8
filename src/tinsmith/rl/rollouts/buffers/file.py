"""Batches as files of a folder that a sampling and a training process share, on one machine or one disk.

    batch-000012.json      a batch
    note-weights.json      a note of one of the two sides

Files are written atomically.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from tinsmith.atomic import atomic_write
from tinsmith.rl.rollouts.buffers.replay import BufferSettings
from tinsmith.rl.rollouts.buffers.sql import SerialExecutor
from tinsmith.rl.rollouts.producer import Batch

_BATCH = TypeAdapter(Batch)


class FileConfig(BufferSettings):
    """Batches in files, which outlive the process and which other processes can open."""

    type: Literal["file"] = "file"
    path: str = ""
    """A folder; empty: `buffer` in the run's."""


class FileBuffer:
    """Implements `base.Buffer`. One process puts batches; whoever trains on them drops them."""

    durable = True

    def __init__(self, folder: Path) -> None:
        self._folder, self._turn = folder, SerialExecutor()
        folder.mkdir(parents=True, exist_ok=True)

    async def put(self, batch: Batch) -> None:
        """On disk when this returns."""
        await self._turn.do(lambda: atomic_write(self._file(batch.step), _BATCH.dump_json(batch)))

    async def numbers(self) -> Collection[int]:
        """Of the files that are there now."""
        return [int(file.stem.removeprefix("batch-")) for file in self._folder.glob("batch-*.json")]

    async def get(self, number: int) -> Batch:
        """Read from the file on each call."""
        return await self._turn.do(lambda: _BATCH.validate_json(self._file(number).read_bytes()))

    async def drop(self, numbers: Collection[int]) -> None:
        """The files go."""
        for number in numbers:
            self._file(number).unlink(missing_ok=True)

    async def note(self, name: str, text: str) -> None:
        """On disk when this returns."""
        await self._turn.do(lambda: atomic_write(self._folder / f"note-{name}.json", text.encode()))

    async def notes(self) -> Mapping[str, str]:
        """Those that are there now."""
        return {
            file.stem.removeprefix("note-"): file.read_text(encoding="utf-8")
            for file in self._folder.glob("note-*.json")
        }

    async def close(self) -> None:
        """All is written."""
        await self._turn.close()

    def _file(self, number: int) -> Path:
        return self._folder / f"batch-{number:06}.json"
