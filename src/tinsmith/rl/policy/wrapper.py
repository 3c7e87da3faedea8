"""Base class of snapshots that change some requests to another snapshot, and pass the others on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from tinsmith.rl.policy.base import ChatCodec, Prompt, SamplingConfig, Snapshot
from tinsmith.rl.types import Turn


class SnapshotWrapper(Snapshot):
    """Passes every request on to `_snapshot`."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    @property
    @override
    def version(self) -> int:
        return self._snapshot.version

    @property
    @override
    def chat(self) -> ChatCodec:
        return self._snapshot.chat

    @override
    async def sample(self, prompt: Prompt, *, count: int, seed: int, sampling: SamplingConfig) -> tuple[Turn, ...]:
        return await self._snapshot.sample(prompt, count=count, seed=seed, sampling=sampling)

    @override
    async def open_model(self, name: str) -> Snapshot:
        return await self._snapshot.open_model(name)

    @override
    async def logprobs(self, tokens: Sequence[int], last: int | None = None) -> np.ndarray:
        return await self._snapshot.logprobs(tokens, last)

    @override
    async def next_logprobs(self, tokens: Sequence[int], ids: Sequence[int]) -> np.ndarray:
        return await self._snapshot.next_logprobs(tokens, ids)

    @override
    async def top_logprobs(self, tokens: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
        return await self._snapshot.top_logprobs(tokens, count)
