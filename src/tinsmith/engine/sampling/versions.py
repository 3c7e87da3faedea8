"""Adapter versions for sampling: immutable, whatever happens to the model that they were captured from.

A captured version is in memory at once. When it has been written to a folder it may leave memory, and is read again
when it is next sampled from. Running sequences hold references to their weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tinsmith.engine.adapters.versions import Version, VersionTable
from tinsmith.engine.exchange.reading import read_saved
from tinsmith.engine.lora import peft
from tinsmith.engine.lora.adapter import AdapterWeights, adapter_weights
from tinsmith.engine.lora.saved_spec import read_spec
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.training.optimizer import AdapterSnapshot
from tinsmith.errors import Gone

MAX_RESIDENT = 4
"""Versions kept in memory although a folder holds them."""


@dataclass(eq=False, slots=True)
class AdapterVersion(Version):
    """`snapshot` until it is on disk, `folder` from then on, `weights` while it is in memory."""

    snapshot: AdapterSnapshot | None = None
    folder: Path | None = None
    weights: AdapterWeights | None = None


class AdapterVersions:
    """The versions that an engine samples from."""

    def __init__(self, base: BaseModel, on_replaced: Callable[[str], None]) -> None:
        """`on_replaced` is called with a name whose version is about to be replaced or removed."""
        self._base, self._on_replaced = base, on_replaced
        self._versions = VersionTable[AdapterVersion]()

    def capture(self, name: str, snapshot: AdapterSnapshot) -> None:
        """Add a snapshot of a model as a version; its tensors are not copied."""
        self._on_replaced(name)
        self._versions.put(name, AdapterVersion(snapshot=snapshot, weights=snapshot.weights))

    async def persist(self, name: str, to: Path) -> int:
        """Write a captured version in a thread, so that sampling continues; returns its bytes."""
        version = self._versions.use(name)
        snapshot = version.snapshot
        if snapshot is None:
            raise Gone(f"Version '{name}' is no longer in memory.", "It was written before: use its folder.")
        source = self._base.card.source
        size = await asyncio.to_thread(peft.write, to, snapshot.layout, snapshot.master, source, None)
        version.snapshot, version.folder = None, to
        self._evict()
        return size

    def attach(self, name: str, source: Path) -> None:
        """Add an adapter folder as a version; its weights are read when first sampled from."""
        read_spec(source)
        self._on_replaced(name)
        self._versions.put(name, AdapterVersion(folder=source))

    def detach(self, name: str) -> None:
        """Remove a version; unknown names are ignored."""
        self._on_replaced(name)
        self._versions.remove(name)

    def generation(self, name: str) -> int:
        """A number that no other version has, not even an earlier one of the same name; 0 for an unknown name."""
        version = self._versions.find(name)
        return version.number if version else 0

    def weights(self, name: str) -> AdapterWeights:
        """The version's weights, read from its folder if necessary.

        Raises Gone for an unknown version, or if its folder was removed.
        """
        version = self._versions.use(name)
        weights = version.weights
        if weights is None:
            assert version.folder is not None
            layout, master = read_saved(version.folder, self._base)
            weights = version.weights = adapter_weights(layout, master.to(self._base.device), self._base.dtype)
        self._evict()
        return weights

    def _evict(self) -> None:
        resident = [version for version in self._versions if version.weights is not None and version.folder]
        for version in resident[:-MAX_RESIDENT]:
            version.weights = None
