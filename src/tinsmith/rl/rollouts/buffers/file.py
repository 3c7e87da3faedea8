"""Buffer as files in a folder that the sampling and training processes share.

    batch-000012.json      a batch
    note-weights.json      a note of one process
    record-tasks           a record of several processes: its revision in the first line, then its text

Files are written atomically. A record is replaced under a lock, which processes on one machine respect, and on several
machines those of a file system with working locks.
"""

from __future__ import annotations

import fcntl
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from typing_extensions import override

from tinsmith.atomic import atomic_write
from tinsmith.rl.rollouts.buffers.base import Buffer, Record
from tinsmith.rl.rollouts.buffers.replay import BufferSettings
from tinsmith.rl.rollouts.buffers.sql import SerialExecutor
from tinsmith.rl.rollouts.progress import BATCH, Batch


class FileConfig(BufferSettings):
    """Batches in files. They outlive the process and other processes can open them."""

    type: Literal["file"] = "file"
    path: str = ""
    """Folder of the files; empty: `buffer` in the run folder."""


class FileBuffer(Buffer):
    """Buffer in files. The sampling process adds batches; the training process deletes them."""

    durable = True

    def __init__(self, folder: Path) -> None:
        self._folder, self._executor = folder, SerialExecutor()
        folder.mkdir(parents=True, exist_ok=True)

    @override
    async def put(self, batch: Batch) -> None:
        await self._executor.run(lambda: atomic_write(self._file(batch.step), BATCH.dump_json(batch)))

    @override
    async def numbers(self) -> Collection[int]:
        return [int(file.stem.removeprefix("batch-")) for file in self._folder.glob("batch-*.json")]

    @override
    async def get(self, number: int) -> Batch:
        return await self._executor.run(lambda: BATCH.validate_json(self._file(number).read_bytes()))

    @override
    async def drop(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._file(number).unlink(missing_ok=True)

    @override
    async def note(self, name: str, text: str) -> None:
        await self._executor.run(lambda: atomic_write(self._folder / f"note-{name}.json", text.encode()))

    @override
    async def notes(self) -> Mapping[str, str]:
        return {
            file.stem.removeprefix("note-"): file.read_text(encoding="utf-8")
            for file in self._folder.glob("note-*.json")
        }

    @override
    async def record(self, name: str) -> Record:
        return await self._executor.run(lambda: self._read_record(name))

    @override
    async def replace_record(self, name: str, revision: int, text: str) -> bool:

        def replace() -> bool:
            with (self._folder / ".lock-records").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if self._read_record(name).revision != revision:
                    return False
                atomic_write(self._folder / f"record-{name}", f"{revision + 1}\n{text}".encode())
                return True

        return await self._executor.run(replace)

    @override
    async def close(self) -> None:
        await self._executor.close()

    def _read_record(self, name: str) -> Record:
        try:
            revision, _, text = (self._folder / f"record-{name}").read_text(encoding="utf-8").partition("\n")
        except FileNotFoundError:
            return Record()
        return Record(int(revision), text)

    def _file(self, number: int) -> Path:
        return self._folder / f"batch-{number:06}.json"
