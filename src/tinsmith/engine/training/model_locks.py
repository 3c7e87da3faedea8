"""Locks of the models of an engine, by which calls on a model take effect in their order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary


class ModelLocks:
    """A lock for each model, as long as a call holds it or waits for it. They are taken in the order of the calls."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, model_id: str) -> asyncio.Lock:
        """Held by the call on a model that takes effect now."""
        lock = self._locks.get(model_id)
        if lock is None:
            lock = self._locks[model_id] = asyncio.Lock()
        return lock

    @asynccontextmanager
    async def of_all(self, model_ids: Iterable[str]) -> AsyncIterator[None]:
        """Hold the locks of several models for the duration of the block."""
        async with AsyncExitStack() as locks:
            for model_id in sorted(set(model_ids)):
                await locks.enter_async_context(self.of(model_id))
            yield
