"""Adapter versions for sampling: frozen when made, whatever is trained or deleted later.

A captured version is in memory at once; when it has been written to a folder it may leave memory again, and is read
back when it is next asked for. Sequences that are running hold their weights themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from tinsmith.engine.lora import peft
from tinsmith.engine.lora.adapter import Weights, weights_of
from tinsmith.engine.lora.linear import layout_for
from tinsmith.engine.model.loading import BaseModel
from tinsmith.engine.training.optimizer import Captured
from tinsmith.errors import Gone

RESIDENT = 4
"""Versions kept in memory though a folder holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """`captured` until it is on disk; `folder` from then on; `weights` while resident."""

    captured: Captured | None = None
    folder: Path | None = None
    weights: Weights | None = None
    life: int = 0


class Versions:
    """By name, most recently used last."""

    def __init__(self, base: BaseModel, forget: Callable[[str], None]) -> None:
        """`forget` is told of names that no longer mean what they meant."""
        self._base, self._forget = base, forget
        self._known: dict[str, _Version] = {}
        self._lives = count(1)

    def capture(self, name: str, captured: Captured) -> None:
        """Usable at once: what is captured is kept, not copied."""
        self._forget(name)
        self._known[name] = _Version(captured=captured, weights=captured.weights, life=next(self._lives))

    async def persist(self, name: str, to: Path) -> int:
        """Write a captured version, in a thread, so that sampling goes on; returns its bytes."""
        captured = self._get(name).captured
        if captured is None:
            raise Gone(f"Version '{name}' is no longer in memory.", "It was written before; use its folder.")
        source = self._base.card.source
        size = await asyncio.to_thread(peft.write, to, captured.layout, captured.master, source, None)
        standing = self._known.get(name)
        if standing is not None and standing.captured is captured:  # nobody forgot it meanwhile
            self._known[name] = replace(standing, captured=None, folder=to)
            self._evict()
        return size

    def attach(self, name: str, source: Path) -> None:
        """Know a folder as a version."""
        peft.read_spec(source)
        self._forget(name)
        self._known[name] = _Version(folder=source, life=next(self._lives))

    def detach(self, name: str) -> None:
        """Forget it."""
        self._forget(name)
        self._known.pop(name, None)

    def life(self, name: str) -> int:
        """A number that no other version has, also of the same name; 0 if it is not known."""
        version = self._known.get(name)
        return version.life if version else 0

    def weights(self, name: str) -> Weights:
        """Read if need be. Raises Gone for a version that is not known, or whose folder was removed."""
        version = self._get(name)
        if version.weights is None:
            assert version.folder is not None
            layout = layout_for(self._base, peft.read_spec(version.folder))
            master = peft.read(version.folder, layout).to(self._base.device)
            version = replace(version, weights=weights_of(layout, master, self._base.dtype))
        del self._known[name]
        self._known[name] = version
        self._evict()
        assert version.weights is not None
        return version.weights

    def _get(self, name: str) -> _Version:
        if name not in self._known:
            raise Gone(f"The engine holds no version '{name}'.", "Save the weights again.")
        return self._known[name]

    def _evict(self) -> None:
        resident = [name for name, version in self._known.items() if version.weights is not None and version.folder]
        for name in resident[:-RESIDENT]:
            self._known[name] = replace(self._known[name], weights=None)
