"""Adapter versions for sampling: immutable, whatever happens to the model that they were captured from.

A captured version is in memory at once. When it has been written to a folder it may leave memory, and is read again
when it is next sampled from. Running sequences hold references to their weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from tinsmith.engine.exchange.reading import read_saved
from tinsmith.engine.lora import peft
from tinsmith.engine.lora.adapter import AdapterWeights, adapter_weights
from tinsmith.engine.lora.saved_spec import read_spec
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.training.optimizer import AdapterSnapshot
from tinsmith.errors import Gone

MAX_RESIDENT = 4
"""Versions kept in memory although a folder holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """A version: `snapshot` until it is on disk, `folder` from then on, `weights` while it is in memory."""

    snapshot: AdapterSnapshot | None = None
    folder: Path | None = None
    weights: AdapterWeights | None = None
    generation: int = 0


class AdapterVersions:
    """Versions by name, most recently used last."""

    def __init__(self, base: BaseModel, on_replaced: Callable[[str], None]) -> None:
        """`on_replaced` is called with a name whose version is about to be replaced or removed."""
        self._base, self._on_replaced = base, on_replaced
        self._versions: dict[str, _Version] = {}
        self._generations = count(1)

    def capture(self, name: str, snapshot: AdapterSnapshot) -> None:
        """Add a snapshot of a model as a version; its tensors are not copied."""
        self._on_replaced(name)
        self._versions[name] = _Version(snapshot=snapshot, weights=snapshot.weights, generation=next(self._generations))

    async def persist(self, name: str, to: Path) -> int:
        """Write a captured version in a thread, so that sampling continues; returns its bytes."""
        snapshot = self._get(name).snapshot
        if snapshot is None:
            raise Gone(f"Version '{name}' is no longer in memory.", "It was written before: use its folder.")
        source = self._base.card.source
        size = await asyncio.to_thread(peft.write, to, snapshot.layout, snapshot.master, source, None)
        current = self._versions.get(name)
        if current is not None and current.snapshot is snapshot:  # it was not replaced in the meantime
            self._versions[name] = replace(current, snapshot=None, folder=to)
            self._evict()
        return size

    def attach(self, name: str, source: Path) -> None:
        """Add an adapter folder as a version; its weights are read when first sampled from."""
        read_spec(source)
        self._on_replaced(name)
        self._versions[name] = _Version(folder=source, generation=next(self._generations))

    def detach(self, name: str) -> None:
        """Remove a version; unknown names are ignored."""
        self._on_replaced(name)
        self._versions.pop(name, None)

    def generation(self, name: str) -> int:
        """A number that no other version has, not even an earlier one of the same name; 0 for an unknown name."""
        version = self._versions.get(name)
        return version.generation if version else 0

    def weights(self, name: str) -> AdapterWeights:
        """The version's weights, read from its folder if necessary.

        Raises Gone for an unknown version, or if its folder was removed.
        """
        version = self._get(name)
        if version.weights is None:
            assert version.folder is not None
            layout, master = read_saved(version.folder, self._base)
            weights = adapter_weights(layout, master.to(self._base.device), self._base.dtype)
            version = replace(version, weights=weights)
        del self._versions[name]
        self._versions[name] = version
        self._evict()
        assert version.weights is not None
        return version.weights

    def _get(self, name: str) -> _Version:
        if name not in self._versions:
            raise Gone(f"The engine has no version '{name}'.", "Save the weights again.")
        return self._versions[name]

    def _evict(self) -> None:
        resident = [name for name, version in self._versions.items() if version.weights is not None and version.folder]
        for name in resident[:-MAX_RESIDENT]:
            self._versions[name] = replace(self._versions[name], weights=None)
