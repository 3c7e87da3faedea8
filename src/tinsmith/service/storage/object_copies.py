"""Copies of checkpoints and captured states in an object store, and the folders here that are copies of its objects.

With a store, a record names its object by digest, and its folder here is a cache: it is fetched again when
it is missing, so the data folder's disk may be lost. Without one, folders are all there is and nothing here does
anything. An object is noted in the database before it is uploaded, and deleted once no record has named it for a day.

Engines on machines that do not see the data folder read and write objects (`engine.adapters.transfer`): what
they write is uploaded there, and no folder appears here until something here reads it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from tinsmith.atomic import link_folder
from tinsmith.engine.adapters.cache import trim_folders
from tinsmith.engine.adapters.transfer import FolderTransfer
from tinsmith.engine.base import SavedAdapter, SavedObject
from tinsmith.service.storage.records import Checkpoint, Model, StoredObject
from tinsmith.service.storage.store import Store

if TYPE_CHECKING:
    from tinsmith.engine.adapters.store import ObjectStore

log = logging.getLogger(__name__)

R = TypeVar("R")
RETRY_S = 5.0
"""Time between two attempts while the store is unavailable."""
UPLOADS = 4
"""Objects that are uploaded at once: a store answers later than it takes to send an adapter's small files."""
COLLECT_S = 60.0
"""Time between two rounds of deletion."""
UNNAMED_S = 86_400.0
"""Time that an object stays which no record names: the record of a publication may follow later."""


class ObjectCopies:
    """The object store of one service, if it has one. `data` is the folder with the copies of `cache_bytes` at most."""

    def __init__(
        self,
        store: Store,
        objects: ObjectStore | None = None,
        data: Path = Path(),
        cache_bytes: int = 0,
        transfer: FolderTransfer | None = None,
    ) -> None:
        """`transfer`: how engines read and write folders; by default they see the data folder."""
        self._store, self._objects = store, objects
        self._transfer = transfer or FolderTransfer()
        self._data, self._cache_bytes = data, cache_bytes
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By digest. Held while the object is published or deleted: a new record may name one that is about to be
        deleted."""
        self._uploads = asyncio.Semaphore(UPLOADS)
        self._fetching: dict[Path, asyncio.Lock] = {}
        self._failed = float("-inf")
        """When the store last did not answer, by the monotonic clock."""

    @property
    def is_available(self) -> bool:
        """Whether there is no store, or it may answer."""
        return time.monotonic() - self._failed > RETRY_S

    async def publish(self, folder: Path, *, waits: bool) -> str | None:
        """Store a folder's files as an object and return its digest; None without a store.

        While the store is unavailable it waits, or raises EngineError. The caller stores the digest in a record.
        """
        if self._objects is None:
            return None
        if (written := self._transfer.find(folder)) is not None:
            await self._store_object(written.digest, written.upload, waits=waits)
            self._transfer.stored(folder)
            return written.digest
        from tinsmith.engine.adapters.store import Manifest

        objects = self._objects
        manifest = await asyncio.to_thread(Manifest.of, folder)
        await self._store_object(
            manifest.digest, lambda: asyncio.to_thread(objects.publish, folder, manifest), waits=waits
        )
        return manifest.digest

    async def source(self, folder: Path, digest: str | None) -> SavedAdapter:
        """What an engine reads in the place of a folder: the folder, fetched if it is missing, or its object.

        Waits while the store is unavailable.
        """
        if not self._transfer.through_store:
            return await self.ensure(folder, digest)
        return SavedObject(digest or await self._digest_of(folder))

    async def link(self, folder: Path, digest: str | None, to: Path) -> str | None:
        """Give a folder's files another name, so that they stay when the folder is deleted. Returns their digest.

        Where engines read objects, only the object has another name: that in the caller's record.
        """
        if self._transfer.through_store:
            digest = digest or await self._digest_of(folder)
        else:
            await asyncio.to_thread(link_folder, await self.ensure(folder, digest), to)
        if digest is not None:
            async with self._lock_of(digest):  # the record follows
                await self._store.put(StoredObject(id=digest, created=time.time()))
        return digest

    async def bring(self, folder: Path) -> None:
        """Have a folder here that an engine has just written and that is not to be published."""
        await self._transfer.bring(folder)

    def forget(self, folder: Path) -> None:
        """A folder that an engine has written is not wanted."""
        self._transfer.forget(folder)

    async def ensure(self, folder: Path, digest: str | None) -> Path:
        """The folder, fetched from its object if it is missing. Waits while the store is unavailable.

        Raises MissingObjectError if the store does not have the object any more.
        """
        if self._objects is None or digest is None:
            return folder
        objects = self._objects
        async with self._fetching.setdefault(folder, asyncio.Lock()):
            if not folder.is_dir():
                log.info("Fetching %s from %s.", digest, objects.url)
                await self._call(lambda: asyncio.to_thread(objects.fetch, digest, folder), waits=True)
            with suppress(FileNotFoundError):
                os.utime(folder)  # its last use
        self._fetching.pop(folder, None)
        return folder

    async def run(self) -> None:
        """Forever: delete objects that no record names, and folders that the cache has no room for."""
        while True:
            await asyncio.sleep(COLLECT_S)
            await self.collect(time.time())
            await self.trim(time.time())

    async def collect(self, now: float) -> int:
        """Delete the objects that no record has named for a day. Returns their number.

        An object that a record comes to name meanwhile is noted again before, under its lock, and is then new.
        """
        if self._objects is None:
            return 0
        objects, deleted, named = self._objects, 0, self._named()
        for stored in self._store.all(StoredObject):
            if stored.id in named or now - stored.created < UNNAMED_S:
                continue
            async with self._lock_of(stored.id):
                current = self._store.find(StoredObject, stored.id)
                if current is None or now - current.created < UNNAMED_S:
                    continue
                await self._call(lambda digest=stored.id: asyncio.to_thread(objects.delete, digest), waits=False)
                await self._store.remove(current)
                deleted += 1
        return deleted

    async def trim(self, now: float) -> int:
        """Delete the least recently used folders that have objects, down to the size of the cache. Returns how many."""
        checkpoints = self._data / "checkpoints"
        folders = {checkpoints / checkpoint.id for checkpoint in self._store.all(Checkpoint) if digest_of(checkpoint)}
        folders |= {self._data / "journal" / str(each.captured) for each in self._store.all(Model) if digest_of(each)}
        return await asyncio.to_thread(trim_folders, folders, self._cache_bytes, now, _delete)

    def _named(self) -> set[str | None]:
        records = [*self._store.all(Checkpoint), *self._store.all(Model)]
        return {digest_of(record) for record in records}

    async def _digest_of(self, folder: Path) -> str:
        """The digest of a folder here that has no object yet: it gets one, for engines that see no folders."""
        digest = await self.publish(folder, waits=True)
        assert digest is not None, "engines read objects only if there is a store"
        return digest

    async def _store_object(self, digest: str, upload: Callable[[], Awaitable[object]], *, waits: bool) -> None:
        """Note an object, and upload it."""
        async with self._lock_of(digest), self._uploads:
            await self._store.put(StoredObject(id=digest, created=time.time()))
            await self._call(upload, waits=waits)

    def _lock_of(self, digest: str) -> asyncio.Lock:
        return self._locks.setdefault(digest, asyncio.Lock())

    async def _call(self, work: Callable[[], Awaitable[R]], *, waits: bool) -> R:
        """Do the work, again and again while the store is unavailable if the caller waits."""
        from tinsmith.engine.adapters.store import StoreUnavailableError

        while True:
            try:
                return await work()
            except StoreUnavailableError as error:
                self._failed = time.monotonic()
                if not waits:
                    raise
                log.warning("%s The next attempt is in %.0f s.", error, RETRY_S)
            await asyncio.sleep(RETRY_S)


def open_objects(url: str) -> ObjectStore:
    """The object store at a URL. Raises ConfigError if it cannot be written."""
    from tinsmith.engine.adapters.store import (
        ObjectStore,
    )  # with fsspec, which a service without a store does not need

    objects = ObjectStore(url)
    objects.check()
    return objects


def digest_of(record: Checkpoint | Model) -> str | None:
    """The object of a record's folder; None if it has none, or needs it no more."""
    if isinstance(record, Model):
        return record.captured_digest if record.state != "ended" else None
    return record.digest


def _delete(folder: Path) -> bool:
    gone = folder.with_name(f".{folder.name}.trimmed")
    try:
        folder.rename(gone)
    except FileNotFoundError:
        return False
    shutil.rmtree(gone, ignore_errors=True)
    return True
