"""Unnamed versions on their way to disk: usable from the engine's memory at once, written behind the answer.

Until one is written, only a replay of its request can bring it back, so no captured state may cover that request.
"""

from __future__ import annotations

import asyncio
import logging

from tinsmith.errors import EngineDied, EngineError, TinsmithError
from tinsmith.service.checkpoints import Checkpoints
from tinsmith.service.engines.host import EngineHost
from tinsmith.service.storage.records import Checkpoint, Model
from tinsmith.service.storage.store import Store

log = logging.getLogger(__name__)

RETRY_S = 30.0
"""A full disk may be emptied."""


class BackgroundWriter:
    """The writes of one engine."""

    def __init__(self, host: EngineHost, store: Store, checkpoints: Checkpoints) -> None:
        self._host = host
        self._store = store
        self._checkpoints = checkpoints
        self._tasks: set[asyncio.Task[None]] = set()
        self._pen = asyncio.Lock()
        """One is written at a time."""

    def has_unwritten_versions(self, model: Model) -> bool:
        """A version of this model is not on disk yet."""
        return any(not one.ready for one in self._store.checkpoints_of_run(model.id))

    def schedule(self, version: Checkpoint) -> None:
        """Begin writing a version that the living engine has just captured."""
        self._host.attached.add(version.id)
        task = asyncio.create_task(self._write(version))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def flush(self, model: Model) -> None:
        """Have all on disk that the model owes. Raises EngineError if that cannot be written."""
        for version in (one for one in self._store.checkpoints_of_run(model.id) if not one.ready):
            try:
                await self._persist(version)
            except EngineDied:
                raise
            except (TinsmithError, OSError) as error:
                what = f"Sampling session {version.name}, saved before this, is not on disk yet: {error}"
                raise EngineError(what, "Send it again later.") from error

    async def close(self) -> None:
        """Abandon what is not written."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write(self, version: Checkpoint) -> None:
        while self._waits(version):
            try:
                await self._persist(version)
            except EngineDied:
                return  # the replay of its request begins this again
            except (TinsmithError, OSError) as error:
                if not self._waits(version):
                    return  # it was replaced, or its session ended, while it was being written
                log.warning("Version %s is not on disk, next try in %.0f s: %s", version.name, RETRY_S, error)
                await asyncio.sleep(RETRY_S)

    async def _persist(self, version: Checkpoint) -> None:
        async with self._pen:
            if not self._waits(version):
                return
            size = await self._host.engine.persist(version.id, self._checkpoints.folder(version.id))
            written = await self._store.update(Checkpoint, version.id, ready=True, size_bytes=size)
            if written is None or written.deleted:
                await self._checkpoints.delete(version)  # its session ended meanwhile

    def _waits(self, version: Checkpoint) -> bool:
        now = self._store.find(Checkpoint, version.id)
        return now is not None and not now.ready
