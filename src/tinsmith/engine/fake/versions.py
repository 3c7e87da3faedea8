"""The adapter versions of a fake engine: in memory until they are on disk, then the last used ones.

Files are read and written in threads, because the API shares the engine's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from tinsmith.engine.fake.model import FakeAdapter, read_adapter, write_adapter
from tinsmith.errors import Gone

CACHED = 4
"""Adapters on disk that stay in memory: a service that runs for weeks has any number of versions."""


class FakeVersions:
    """Adapters by version. They are never changed in place."""

    def __init__(self) -> None:
        self._adapters: dict[str, FakeAdapter | str] = {}
        """Of each version the adapter, or its folder once it is on disk; a Path takes four times the memory."""
        self._read = lru_cache(CACHED)(lambda folder: read_adapter(Path(folder))[0])

    def __len__(self) -> int:
        return len(self._adapters)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._adapters))

    def capture(self, version: str, adapter: FakeAdapter) -> None:
        """Add a version that is in memory only."""
        self._adapters[version] = adapter

    async def persist(self, version: str, to: Path) -> int:
        """Write a version; returns its bytes. Raises Gone for an unknown version."""
        adapter = await self.adapter(version)
        size = await asyncio.to_thread(write_adapter, to, adapter, None)
        if self._adapters.get(version) is adapter:  # else it was detached during the write
            self._adapters[version] = str(to)
        return size

    def attach(self, version: str, source: Path) -> None:
        """Add a version that is on disk. It is read when it is first used."""
        self._adapters[version] = str(source)

    def detach(self, version: str) -> None:
        """Remove a version, if it is there."""
        self._adapters.pop(version, None)

    def clear(self) -> None:
        """Remove all versions."""
        self._adapters.clear()
        self._read.cache_clear()

    async def adapter(self, version: str) -> FakeAdapter:
        """The adapter of a version. Raises Gone for an unknown version, EngineError if its folder cannot be read."""
        adapter = self._adapters.get(version)
        if adapter is None:
            raise Gone(f"The engine has no adapter version {version}.", "Attach it again.")
        return await asyncio.to_thread(self._read, adapter) if isinstance(adapter, str) else adapter
