"""Unnamed versions on their way to disk: usable from the engine's memory at once, written behind the answer.

Until one is written, only a replay of its request can bring it back, so no captured state may cover that request.
"""

from __future__ import annotations

import asyncio
import logging

from tinsmith.errors import EngineDied, TinsmithError
from tinsmith.service.checkpoints import Checkpoints
from tinsmith.service.engines import EngineHost
from tinsmith.service.records import Checkpoint, Model
from tinsmith.service.store import Store

log = logging.getLogger(__name__)

RETRY_S = 30.0
"""A full disk may be emptied."""


class Behind:
    """The writes of one engine."""

    def __init__(self, host: EngineHost, store: Store, checkpoints: Checkpoints) -> None:
        self._host = host
        self._store = store
        self._checkpoints = checkpoints
        self._tasks: set[asyncio.Task[None]] = set()

    def owes(self, model: Model) -> bool:
        """A version of this model is not on disk yet."""
        return any(not one.ready for one in self._store.of_run(model.id))

    def write(self, version: Checkpoint) -> None:
        """Begin writing a version that the living engine has just captured."""
        self._host.known.add(version.id)
        task = asyncio.create_task(self._write(version))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Abandon what is not written."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write(self, version: Checkpoint) -> None:
        while self._store.find(Checkpoint, version.id) is not None:
            try:
                size = await self._host.engine.persist(version.id, self._checkpoints.folder(version.id))
            except EngineDied:
                return  # the replay of its request begins this again
            except TinsmithError as error:
                if self._store.find(Checkpoint, version.id) is None:
                    return  # it was replaced, or its session ended, while it was being written
                log.warning("Version %s is not on disk, next try in %.0f s: %s", version.name, RETRY_S, error)
                await asyncio.sleep(RETRY_S)
                continue
            written = await self._store.change(Checkpoint, version.id, ready=True, size_bytes=size)
            if written is None or written.deleted:
                await self._checkpoints.delete(version)  # its session ended meanwhile
            return
