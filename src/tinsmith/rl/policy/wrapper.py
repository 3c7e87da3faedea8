"""Snapshots around another one: the base class, which passes all requests on, and one that recomputes logprobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from typing_extensions import override

from tinsmith.rl.policy.base import Prompt, SamplingConfig, Snapshot
from tinsmith.rl.policy.chat import ChatCodec
from tinsmith.rl.types import Tokens, Turn


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
    async def logprobs(self, tokens: Tokens, last: int | None = None) -> np.ndarray:
        return await self._snapshot.logprobs(tokens, last)

    @override
    async def next_logprobs(self, tokens: Sequence[int], ids: Sequence[int]) -> np.ndarray:
        return await self._snapshot.next_logprobs(tokens, ids)

    @override
    async def top_logprobs(self, tokens: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
        return await self._snapshot.top_logprobs(tokens, count)


class RecomputingSnapshot(SnapshotWrapper):
    """Computes the logprobs of replies again, at temperature 1, where the algorithm needs them."""

    def __init__(self, snapshot: Snapshot, recomputes: Callable[[SamplingConfig], bool]) -> None:
        """`recomputes`: whether logprobs of replies sampled with these settings are computed again."""
        super().__init__(snapshot)
        self._recomputes = recomputes

    @override
    async def sample(self, prompt: Prompt, *, count: int, seed: int, sampling: SamplingConfig) -> tuple[Turn, ...]:
        """One more request for each reply whose logprobs are computed again."""
        turns = await self._snapshot.sample(prompt, count=count, seed=seed, sampling=sampling)
        if not self._recomputes(sampling):
            return turns
        return tuple(await asyncio.gather(*map(self._with_logprobs, turns)))

    async def _with_logprobs(self, turn: Turn) -> Turn:
        logprobs = await self._snapshot.logprobs(turn.sequence)
        return replace(turn, logprobs=tuple(map(float, logprobs[len(logprobs) - len(turn.tokens) :])))

    @override
    def wrapped(self, wrap: Callable[[Snapshot], Snapshot]) -> Snapshot:
        return RecomputingSnapshot(self._snapshot.wrapped(wrap), self._recomputes)
