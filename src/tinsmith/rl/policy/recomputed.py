"""Snapshot whose replies carry logprobs at temperature 1, whatever temperature they are sampled at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from typing_extensions import override

from tinsmith.rl.policy.base import Prompt, SamplingConfig, Snapshot
from tinsmith.rl.policy.wrapper import SnapshotWrapper
from tinsmith.rl.types import Turn


class RecomputingSnapshot(SnapshotWrapper):
    """A snapshot that computes the logprobs of its replies again, at temperature 1, where the algorithm needs them."""

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
        logprobs = await self._snapshot.logprobs([*turn.prompt, *turn.tokens])
        return replace(turn, logprobs=tuple(map(float, logprobs[len(logprobs) - len(turn.tokens) :])))

    @override
    def wrapped(self, wrap: Callable[[Snapshot], Snapshot]) -> Snapshot:
        return RecomputingSnapshot(self._snapshot.wrapped(wrap), self._recomputes)
