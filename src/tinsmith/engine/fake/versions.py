"""The adapter versions of a fake engine: in memory until they are on disk, then in a cache of limited size.

Files are read and written in threads, because the API shares the engine's event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from tinsmith.engine.fake.model import FakeAdapter, read_adapter, write_adapter
from tinsmith.errors import Gone

CACHE_BYTES = 16 << 20
"""Adapters that are on disk and stay in memory, those last used: a service that runs for weeks has any number."""


class FakeVersions:
    """Adapters by version. They are never changed in place."""

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self._cache_bytes = cache_bytes
        self._unwritten: dict[str, FakeAdapter] = {}
        self._folders: dict[str, str] = {}
        """Folders of the versions on disk; a Path takes four times the memory."""
        self._cache: OrderedDict[str, FakeAdapter] = OrderedDict()
        """Versions on disk, the last used at the end."""
        self.cached_bytes = 0

    def __len__(self) -> int:
        return len(self._unwritten) + len(self._folders)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._unwritten, *self._folders])

    def capture(self, version: str, adapter: FakeAdapter) -> None:
        """Add a version that is in memory only."""
        self.detach(version)
        self._unwritten[version] = adapter

    async def persist(self, version: str, to: Path) -> int:
        """Write a version; returns its bytes. Raises Gone for an unknown version."""
        adapter = await self.adapter(version)
        size = await asyncio.to_thread(write_adapter, to, adapter, None)
        if self._unwritten.get(version) is adapter:  # else it was detached during the write
            del self._unwritten[version]
            self.attach(version, to)
            self._keep(version, adapter)
        return size

    def attach(self, version: str, source: Path) -> None:
        """Add a version that is on disk. It is read when it is first used."""
        self.detach(version)
        self._folders[version] = str(source)

    def detach(self, version: str) -> None:
        """Remove a version, if it is there."""
        self._unwritten.pop(version, None)
        self._folders.pop(version, None)
        self._drop(version)

    def clear(self) -> None:
        """Remove all versions."""
        for version in self:
            self.detach(version)

    async def adapter(self, version: str) -> FakeAdapter:
        """The adapter of a version. Raises Gone for an unknown version, EngineError if its folder cannot be read."""
        adapter = self._unwritten.get(version) or self._cache.get(version)
        if adapter is None:
            folder = self._folders.get(version)
            if folder is None:
                raise Gone(f"The engine has no adapter version {version}.", "Attach it again.")
            adapter = (await asyncio.to_thread(read_adapter, Path(folder)))[0]
        if version in self._folders:
            self._keep(version, adapter)
        return adapter

    def _keep(self, version: str, adapter: FakeAdapter) -> None:
        """Put a version at the end of the cache, and drop the first ones if it is full; one always stays."""
        self._drop(version)
        self._cache[version] = adapter
        self.cached_bytes += _size(adapter)
        while self.cached_bytes > self._cache_bytes and len(self._cache) > 1:
            self._drop(next(iter(self._cache)))

    def _drop(self, version: str) -> None:
        adapter = self._cache.pop(version, None)
        if adapter is not None:
            self.cached_bytes -= _size(adapter)


def _size(adapter: FakeAdapter) -> int:
    return adapter.a.nbytes + adapter.b.nbytes
