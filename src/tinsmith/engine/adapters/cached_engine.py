"""An engine whose callers may name objects instead of folders: in a process that does not see the data folder.

Sources are fetched into the cache of the machine. What is written stays there until `upload` stores it: the service
notes the digest in its database first. No torch here.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from tinsmith.engine.adapters.cache import ObjectCache, WrittenObject
from tinsmith.engine.base import (
    OnDelta,
    Pass,
    PassResult,
    SampleRequest,
    SampleResult,
    SavedAdapter,
    SavedObject,
)
from tinsmith.engine.interface import Engine
from tinsmith.engine.processes.rpc import DelegatingEngine
from tinsmith.errors import Gone, TinsmithError

if TYPE_CHECKING:
    from tinsmith.engine.adapters.store import Manifest

log = logging.getLogger(__name__)

R = TypeVar("R")
RETRY_S = 5.0
"""Time between two attempts while the store is unavailable."""


class CachedEngine(DelegatingEngine):
    """An engine whose callers may name objects instead of folders. Implements `engine.interface.Engine`."""

    def __init__(self, engine: Engine, cache: ObjectCache) -> None:
        super().__init__(engine)
        self._cache = cache
        self._sources: dict[str, str] = {}
        """Digest of the object of each version that has one."""
        self._unstored: dict[str, Manifest] = {}
        """Objects that were written here, by digest, until they are in the store."""
        self._transfers = 0
        """Calls of the store that run."""

    @property
    @override
    def progress(self) -> int:
        """Progress of the engine. While the store is read or written it grows with time: a slow store is no stall."""
        return self._engine.progress + (int(time.monotonic()) if self._transfers else 0)

    @override
    async def fork(self, model_id: str, source: str | SavedAdapter, *, optimizer: bool) -> int:
        async with self._local(source) as folder:
            return await self._engine.fork(model_id, folder, optimizer=optimizer)

    @override
    async def load(self, model_id: str, source: SavedAdapter, *, optimizer: bool) -> None:
        async with self._local(source) as folder:
            await self._engine.load(model_id, folder, optimizer=optimizer)

    @override
    async def attach(self, version: str, source: SavedAdapter) -> None:
        async with self._local(source) as folder:
            await self._engine.attach(version, folder)
        self._remember(version, source.digest if isinstance(source, SavedObject) else None)

    @override
    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        ready: list[Pass] = []
        failed: dict[int, TinsmithError] = {}
        for index, request in enumerate(passes):
            try:
                async with self._local(request.start) as folder:
                    ready.append(request if folder is request.start else replace(request, start=folder))
            except TinsmithError as error:  # of this pass alone
                failed[index] = error
        results = iter(await self._engine.run(ready) if ready else [])
        return [failed[index] if index in failed else next(results) for index in range(len(passes))]

    @override
    async def persist(self, version: str, to: Path) -> int:
        size = await self._engine.persist(version, to)
        self._remember(version, None)
        return size

    @override
    async def capture(self, model_id: str, version: str) -> None:
        await self._engine.capture(model_id, version)
        self._remember(version, None)

    @override
    async def detach(self, version: str) -> None:
        await self._engine.detach(version)
        self._remember(version, None)

    @override
    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        digest = self._sources.get(request.version or "")
        if digest is not None and digest not in self._unstored:
            await self._fetched(digest)  # the engine may have to read it again
        return await self._engine.sample(request, on_delta)

    async def save_object(self, model_id: str, *, optimizer: bool) -> WrittenObject:
        """As `save`, into a new object."""
        return await self._written(lambda to: self._engine.save(model_id, to, optimizer=optimizer))

    async def persist_object(self, version: str) -> WrittenObject:
        """As `persist`, into a new object."""
        written = await self._written(lambda to: self._engine.persist(version, to))
        self._remember(version, written.digest)
        return written

    async def upload(self, digest: str) -> None:
        """Store an object that was written here. Raises StoreUnavailableError; Gone if it is not here any more."""
        manifest = self._unstored.get(digest)
        if manifest is None:
            return  # another call has stored the same content
        try:
            await self._transfer(self._cache.upload, digest, manifest)
        except OSError as error:
            raise Gone(f"Object {digest} is not in the cache of its machine any more: {error}") from error
        self._unstored.pop(digest, None)

    async def read_file(self, digest: str, name: str, offset: int, size: int) -> bytes:
        """A part of a file of an object that was written here."""

        def read() -> bytes:
            with (self._cache.folder(digest) / name).open("rb") as file:
                file.seek(offset)
                return file.read(size)

        return await asyncio.to_thread(read)

    @override
    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._cache.close)

    def _remember(self, version: str, digest: str | None) -> None:
        self._sources.pop(version, None)
        if digest is not None:
            self._sources[version] = digest

    async def _written(self, write: Callable[[Path], Awaitable[int]]) -> WrittenObject:
        """The object of the folder that `write` writes."""
        folder = self._cache.new_folder()
        size = await write(folder)
        manifest = await asyncio.to_thread(self._cache.add, folder)
        self._unstored[manifest.digest] = manifest
        return WrittenObject(bytes=size, digest=manifest.digest, names=tuple(manifest.files))

    @asynccontextmanager
    async def _local(self, source: Any) -> AsyncIterator[Any]:
        """The folder of an object, or the source if it is none. Errors within the block do not name the folder."""
        if not isinstance(source, SavedObject):
            yield source
            return
        folder = await self._fetched(source.digest)
        try:
            yield folder
        except TinsmithError as error:
            error.message = error.message.replace(str(folder), str(source))
            raise

    async def _fetched(self, digest: str) -> Path:
        """The folder of an object. Waits while the store is unavailable: a replay must not fail for that."""
        from tinsmith.engine.adapters.store import StoreUnavailableError  # with fsspec

        while True:
            try:
                return await self._transfer(self._cache.ensure, digest)
            except StoreUnavailableError as error:
                log.warning("%s The next attempt is in %.0f s.", error, RETRY_S)
            await asyncio.sleep(RETRY_S)

    async def _transfer(self, work: Callable[..., R], *args: Any) -> R:
        """Call a function that may read or write the store, in a thread."""
        self._transfers += 1
        try:
            return await asyncio.to_thread(work, *args)
        finally:
            self._transfers -= 1


def with_objects(load: Callable[[Any], Any], payload: bytes) -> Callable[[Any], Any]:
    """`load`, whose engine has the cache that the payload of a launch token names, if it names one."""
    if not payload:
        return load

    def load_with_cache(config: Any) -> Any:
        cache = ObjectCache.of(pickle.loads(payload))
        return CachedEngine(load(config), cache)

    return load_with_cache
