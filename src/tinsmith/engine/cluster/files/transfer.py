"""The service's side of adapter files: in the data folder, which all processes see, or as objects of a store.

A `FolderTransfer` knows which of both, once the machines are known. Through a store, what processes write stays in the
cache of their machine until the service has noted the object's digest and has them upload it; sources of loads, forks
and versions are named by digest. The files themselves come to this machine only where the service reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from tinsmith.atomic import atomic_folder
from tinsmith.engine.base import ModelCard, OnDelta
from tinsmith.engine.cluster.files.cache import NEW_OBJECT, ObjectSettings, WrittenObject, digest_in, object_path
from tinsmith.engine.cluster.machines.plan import check_folder, check_store, without_sight
from tinsmith.engine.cluster.placement import Seat
from tinsmith.engine.remote import EngineCalls

log = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
"""Bytes of a file in one message."""


class Calls(Protocol):
    """An engine's process, as far as its files go."""

    @property
    def card(self) -> ModelCard:
        """The model's properties."""
        ...

    @property
    def progress(self) -> int:
        """Grows while it works."""
        ...

    async def call(self, method: str, *args: Any, on_delta: OnDelta | None = None, **options: Any) -> Any:
        """Call a method of its engine."""
        ...

    async def close(self) -> None:
        """End it."""
        ...


@dataclass(eq=False, slots=True)
class WrittenFolder:
    """A folder that a process has written as an object, and that is in its machine's cache only."""

    written: WrittenObject
    process: Calls
    on_stored: list[Callable[[Path], None]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Of the object."""
        return self.written.digest

    async def upload(self) -> None:
        """Have it stored. Raises StoreUnavailableError, EngineDied."""
        await self.process.call("upload", self.digest)

    async def bring(self, to: Path) -> None:
        """Copy its files into a folder here, over the connection of the process."""
        with atomic_folder(to) as temporary:
            for name in self.written.names:
                with (temporary / name).open("wb") as file:
                    while piece := await self.process.call("read_file", self.digest, name, file.tell(), PIECE_BYTES):
                        file.write(piece)


class FolderTransfer:
    """How the adapter files of one service reach its processes."""

    def __init__(self, objects: ObjectSettings | None = None) -> None:
        """`objects`: the store that processes may use; without it all must see the data folder."""
        self.objects = objects
        self.through_store = False
        """Whether processes take and make objects. Once a machine does not see the data folder, all do."""
        self._machines: set[str] = set()
        """Names of the machines that were checked."""
        self._written: dict[Path, WrittenFolder] = {}

    @property
    def payload(self) -> bytes:
        """For the tickets of processes."""
        return self.objects.encode() if self.objects is not None else b""

    async def choose(self, seats: Sequence[Seat], folder: Path, others: Sequence[Seat] = ()) -> None:
        """Find out whether machines see a folder. Raises ConfigError if one sees neither it nor the store.

        `others`: seats of processes that run, which must reach the store, too, once processes use it.
        """
        seats = [seat for seat in seats if seat.machine not in self._machines]
        if not seats:
            return
        if self.objects is None:
            await check_folder(seats, folder)
        elif blind := await without_sight(seats, folder):
            await check_store(seats if self.through_store else [*seats, *others], self.objects.url)
            if not self.through_store:
                log.info("%s does not see %s: adapters go through %s.", blind, folder, self.objects.url)
            self.through_store = True
        self._machines |= {seat.machine for seat in seats}

    async def write(self, to: Path, process: Calls, call: Callable[[Path], Awaitable[Any]]) -> int:
        """Have a process write a folder; returns its size in bytes. Through a store it is not here then."""
        if not self.through_store:
            return await call(to)
        written = await call(NEW_OBJECT)
        self._written[to] = WrittenFolder(written, process)
        return written.bytes

    def find(self, folder: Path) -> WrittenFolder | None:
        """The object that was written in the place of a folder and is not stored yet."""
        return self._written.get(folder)

    def stored(self, folder: Path) -> None:
        """The object of a folder is in the store."""
        if (done := self._written.pop(folder, None)) is not None:
            for publish in done.on_stored:
                publish(object_path(done.digest))

    def forget(self, folder: Path) -> None:
        """The folder is not wanted any more."""
        self._written.pop(folder, None)

    def can_read(self, path: Path) -> bool:
        """Whether processes can read by this path: no folder any more once one of them does not see the data folder."""
        return not self.through_store or digest_in(path) is not None

    def when_readable(self, folder: Path, publish: Callable[[Path], None]) -> None:
        """Call `publish` with the path that processes read a written folder by, once they can."""
        written = self._written.get(folder)
        if written is None:
            publish(folder)
        else:
            written.on_stored.append(publish)

    async def bring(self, folder: Path) -> None:
        """Copy a folder that a process has written to this machine, if it is not here, and forget its object."""
        written = self._written.pop(folder, None)
        if written is not None:
            await written.bring(folder)


class TransferringEngine(EngineCalls):
    """The training processes, which may write objects in the place of folders. Implements `engine.interface.Engine`."""

    def __init__(self, process: Calls, transfer: FolderTransfer) -> None:
        self._process, self._transfer = process, transfer

    @property
    def card(self) -> ModelCard:
        """The model's properties."""
        return self._process.card

    @property
    def progress(self) -> int:
        """Grows while the processes work."""
        return self._process.progress

    @override
    async def call(self, method: str, *args: Any, on_delta: OnDelta | None = None, **options: Any) -> Any:
        return await self._process.call(method, *args, on_delta=on_delta, **options)

    @override
    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        save = super().save
        return await self._transfer.write(to, self._process, lambda to: save(model_id, to, optimizer=optimizer))

    @override
    async def persist(self, version: str, to: Path) -> int:
        persist = super().persist
        return await self._transfer.write(to, self._process, lambda to: persist(version, to))

    async def close(self) -> None:
        """End the processes."""
        await self._process.close()
