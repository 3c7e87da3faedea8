"""Which unnamed sampler versions age out: those that are neither among the newest of their model nor in use.

A run that samples on the current weights leaves a version at each step. The newest versions of a model always stay, so
that samples of a few steps ago find their weights; older ones stay while they are sampled from. Their number is
limited: a version of SmolLM2 at rank 32 takes 45 MB on disk.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tinsmith.service.storage.records import Checkpoint

IN_USE_S = 600.0
"""A version is in use for so long after it was saved or last sampled from: no limit deletes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLimits:
    """What stays of the unnamed versions of a model."""

    newest: int
    """Number of the newest versions that always stay."""
    most: int
    """Number of versions that stay at most; those in use stay all the same."""
    retention_s: float
    """Older ones stay so long after they were saved or last sampled from."""


class VersionUse:
    """When versions were last sampled from. After a start, versions count as used at the start."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._started = clock()
        self._sampled: dict[str, float] = {}
        self._running: Counter[str] = Counter()

    @asynccontextmanager
    async def sampling(self, version: str | None) -> AsyncIterator[None]:
        """Mark a version as in use for the duration of the block; None is the base model."""
        if version is None:
            yield
            return
        self._running[version] += 1
        try:
            yield
        finally:
            self._running[version] -= 1
            if not self._running[version]:
                del self._running[version]
            self._sampled[version] = self._clock()

    def forget(self, version: str) -> None:
        """Drop what is known about a deleted version."""
        self._sampled.pop(version, None)

    def aged_out(
        self, checkpoints: Iterable[Checkpoint], inflight: Iterable[str | None], limits: VersionLimits
    ) -> list[Checkpoint]:
        """The unnamed versions to delete. `inflight` are versions that inflight sampling sessions follow."""
        followed = set(inflight)
        by_run: dict[str, list[Checkpoint]] = {}
        for checkpoint in checkpoints:
            if checkpoint.kind == "ephemeral" and checkpoint.id not in followed:
                by_run.setdefault(checkpoint.run, []).append(checkpoint)
        now = self._clock()
        old = []
        for versions in by_run.values():
            versions.sort(key=lambda version: version.created, reverse=True)
            unused = [(self._last(version), version) for version in versions[limits.newest :] if version.ready]
            unused = [(last, version) for last, version in unused if last < now - min(IN_USE_S, limits.retention_s)]
            unused.sort(key=lambda entry: entry[0])
            excess = len(versions) - limits.most
            before = now - limits.retention_s
            old += [version for number, (last, version) in enumerate(unused) if number < excess or last < before]
        return old

    def _last(self, version: Checkpoint) -> float:
        if version.id in self._running:
            return self._clock()
        return max(version.created, self._started, self._sampled.get(version.id, 0.0))
