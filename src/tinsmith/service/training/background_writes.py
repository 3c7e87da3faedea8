"""Background writes of unnamed versions, which the engine can use from memory at once.

Until a version is on disk, only a replay of its request can make it again, so no captured state may cover the request.
Versions that are not written yet take memory, so a client that saves faster than the disk writes has to wait.
"""

from __future__ import annotations

import asyncio
import logging
from weakref import WeakValueDictionary

from tinsmith.atomic import remove_unfinished
from tinsmith.errors import EngineDied, EngineError, TinsmithError
from tinsmith.plurals import counted
from tinsmith.service.checkpoints import Checkpoints
from tinsmith.service.engines.host import EngineHost
from tinsmith.service.storage.records import Checkpoint, Model
from tinsmith.service.storage.store import Store

log = logging.getLogger(__name__)

RETRY_S = 30.0
"""Time between two attempts to write a version: a full disk may be emptied."""
MAX_UNWRITTEN = 16
"""Versions of an engine that wait for their write at most; one of SmolLM2 at rank 32 takes 45 MB of memory."""
LOOK_S = 0.5
"""Time between two looks at whether the writes fail."""


class BackgroundWriter:
    """Writes the unnamed versions of one engine one at a time, and has several uploaded at once."""

    def __init__(self, host: EngineHost, store: Store, checkpoints: Checkpoints) -> None:
        self._host = host
        self._store = store
        self._checkpoints = checkpoints
        self._sizes: dict[str, int] = {}
        """Bytes of the versions that the engine has written, once only, and that the object store does not have yet."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()
        """Held while the engine writes a version."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By version: it is written and uploaded once, while others are uploaded."""
        self._error: Exception | None = None
        """Why the last write failed; None if it did not."""

    def has_unwritten_versions(self, model: Model) -> bool:
        """Whether a version of this model is not on disk yet."""
        return any(not version.ready for version in self._store.checkpoints_of_run(model.id))

    async def wait_for_room(self) -> None:
        """Wait until fewer than MAX_UNWRITTEN versions wait for their write. Raises EngineError if writes fail."""
        while len(self._tasks) >= MAX_UNWRITTEN:
            if self._error is not None:
                raise EngineError(
                    f"{counted(len(self._tasks), 'sampling session')}, saved before: not on disk yet: {self._error}",
                    "Send it again later.",
                )
            await asyncio.wait(self._tasks, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)

    def schedule(self, version: Checkpoint) -> None:
        """Start writing a version that the running engine has just captured."""
        self._host.attached.add(version.id)
        self._sizes.pop(version.id, None)
        task = asyncio.create_task(self._write(version))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def flush(self, model: Model) -> None:
        """Write all versions of the model now. Raises EngineError if that fails."""
        unwritten = [version for version in self._store.checkpoints_of_run(model.id) if not version.ready]
        for version in unwritten:
            try:
                await self._persist(version)
            except EngineDied:
                raise
            except (TinsmithError, OSError) as error:
                raise EngineError(
                    f"Sampling session {version.name}, saved before this, is not on disk yet: {error}",
                    "Send it again later.",
                ) from error

    async def close(self) -> None:
        """Abandon unfinished writes."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write(self, version: Checkpoint) -> None:
        while self._is_unwritten(version):
            try:
                await self._persist(version)
            except EngineDied:
                return  # the replay of its request schedules it again
            except (TinsmithError, OSError) as error:
                if not self._is_unwritten(version):
                    return  # replaced, or its session ended, during the write
                self._error = error
                log.warning("Version %s is not on disk, next attempt in %.0f s: %s", version.name, RETRY_S, error)
                await asyncio.sleep(RETRY_S)

    async def _persist(self, version: Checkpoint) -> None:
        async with self._locks.setdefault(version.id, asyncio.Lock()):
            async with self._writing:
                if not self._is_unwritten(version):
                    self._sizes.pop(version.id, None)
                    return
                size = self._sizes[version.id] = self._sizes.get(version.id) or await self._write_folder(version)
            digest = await self._checkpoints.publish(version.id, waits=False)
            self._error = None
            self._sizes.pop(version.id, None)
            written = await self._store.update(Checkpoint, version.id, ready=True, size_bytes=size, digest=digest)
            if written is None or written.deleted:
                await self._checkpoints.delete(version)  # its session ended during the write

    async def _write_folder(self, version: Checkpoint) -> int:
        """Have the engine write a version. Returns its size in bytes."""
        folder = self._checkpoints.folder(version.id)
        try:
            return await self._host.engine.persist(version.id, folder)
        except EngineDied:
            remove_unfinished(folder)  # its session may end before a replay writes it again
            raise

    def _is_unwritten(self, version: Checkpoint) -> bool:
        current = self._store.find(Checkpoint, version.id)
        return current is not None and not current.ready
