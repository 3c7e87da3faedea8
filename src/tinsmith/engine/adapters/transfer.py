"""The service's side of adapter files: in the data folder, which all processes see, or as objects of a store.

A `FolderTransfer` knows which of both, once the machines are known. Through a store, what processes write stays in the
cache of their machine until the service has noted the object's digest and has them upload it; sources of loads, forks
and versions are named by digest. The files themselves come to this machine only where the service reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

from tinsmith.atomic import atomic_folder
from tinsmith.engine.adapters.access import check_folder, check_store, without_sight
from tinsmith.engine.adapters.cache import ObjectSettings, WrittenObject
from tinsmith.engine.adapters.cached_engine import CachedEngine
from tinsmith.engine.base import SavedAdapter, SavedObject
from tinsmith.engine.processes.client import ServedEngine
from tinsmith.engine.processes.rpc import DelegatingEngine, EngineClient
from tinsmith.engine.processes.slots import Slot

log = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
"""Bytes of a file in one message."""


@dataclass(eq=False, slots=True)
class WrittenFolder:
    """A folder that a process has written as an object, and that is in its machine's cache only."""

    written: WrittenObject
    process: EngineClient
    on_stored: list[Callable[[SavedAdapter], None]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Of the object."""
        return self.written.digest

    async def upload(self) -> None:
        """Have it stored. Raises StoreUnavailableError, EngineDied."""
        await self.process.call(CachedEngine.upload, self.digest)

    async def bring(self, to: Path) -> None:
        """Copy its files into a folder here, over the connection of the process."""
        with atomic_folder(to) as temporary:
            for name in self.written.names:
                with (temporary / name).open("wb") as file:
                    while piece := await self._read(name, file.tell()):
                        file.write(piece)

    async def _read(self, name: str, offset: int) -> bytes:
        return await self.process.call(CachedEngine.read_file, self.digest, name, offset, PIECE_BYTES)


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
        """For the launch tokens of processes."""
        return self.objects.encode() if self.objects is not None else b""

    async def choose(self, slots: Sequence[Slot], folder: Path, others: Sequence[Slot] = ()) -> None:
        """Find out whether machines see a folder. Raises ConfigError if one sees neither it nor the store.

        `others`: slots of processes that run, which must reach the store, too, once processes use it.
        """
        slots = [slot for slot in slots if slot.machine not in self._machines]
        if not slots:
            return
        if self.objects is None:
            await check_folder(slots, folder)
        elif blind := await without_sight(slots, folder):
            await check_store(slots if self.through_store else [*slots, *others], self.objects.url)
            if not self.through_store:
                log.info("%s does not see %s: adapters go through %s.", blind, folder, self.objects.url)
            self.through_store = True
        self._machines |= {slot.machine for slot in slots}

    def add(self, to: Path, written: WrittenObject, process: EngineClient) -> int:
        """A process has written an object in the place of a folder, which is not here then; returns its size."""
        self._written[to] = WrittenFolder(written, process)
        return written.bytes

    def find(self, folder: Path) -> WrittenFolder | None:
        """The object that was written in the place of a folder and is not stored yet."""
        return self._written.get(folder)

    def stored(self, folder: Path) -> None:
        """The object of a folder is in the store."""
        if (done := self._written.pop(folder, None)) is not None:
            for publish in done.on_stored:
                publish(SavedObject(done.digest))

    def forget(self, folder: Path) -> None:
        """The folder is not wanted any more."""
        self._written.pop(folder, None)

    def can_read(self, source: SavedAdapter) -> bool:
        """Whether processes can read a saved adapter: only objects once one of them does not see the data folder."""
        return not self.through_store or isinstance(source, SavedObject)

    def when_readable(self, folder: Path, publish: Callable[[SavedAdapter], None]) -> None:
        """Call `publish` with the saved adapter as processes read it, once they can."""
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


class TransferringEngine(DelegatingEngine):
    """The training processes, which may write objects in the place of folders. Implements `engine.interface.Engine`."""

    def __init__(self, process: ServedEngine, transfer: FolderTransfer) -> None:
        super().__init__(process)
        self._process, self._transfer = process, transfer

    @override
    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        if not self._transfer.through_store:
            return await self._process.save(model_id, to, optimizer=optimizer)
        written = await self._process.call(CachedEngine.save_object, model_id, optimizer=optimizer)
        return self._transfer.add(to, written, self._process)

    @override
    async def persist(self, version: str, to: Path) -> int:
        if not self._transfer.through_store:
            return await self._process.persist(version, to)
        written = await self._process.call(CachedEngine.persist_object, version)
        return self._transfer.add(to, written, self._process)
