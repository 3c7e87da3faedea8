"""A shadow server without a model, which records its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
from typing_extensions import override

from tinsmith.integrations.minds.shadow.config import Mode, StepParams
from tinsmith.integrations.minds.shadow.records import Fork, ProbeDelta, ShadowGroup, ShadowServer, ShadowText


def text(*tokens: int) -> ShadowText:
    """A text whose targets all have weight 1."""
    return ShadowText(tokens=tokens, weights=(1.0,) * (len(tokens) - 1))


class ScriptedFork(Fork):
    """After a step, every logprob is higher by a hundredth of the first token of the train texts."""

    def __init__(self, server: ScriptedShadowServer) -> None:
        self._server = server
        self._shift = 0.0

    @override
    async def step(
        self, group: ShadowGroup, params: StepParams, *, before: bool
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        await self._server.pause()
        pre = await self.logprobs(group.probes) if before else []
        self._shift += 0.01 * sum(text.tokens[0] for text in group.train)
        return pre, await self.logprobs(group.probes)

    @override
    async def logprobs(self, texts: Sequence[ShadowText]) -> list[np.ndarray]:
        return [np.full(len(text.weights), self._shift - 1.0) for text in texts]

    @override
    def release(self) -> None:
        self._server.live -= 1


class ScriptedShadowServer(ShadowServer):
    """Virtual effects are the first token of the train texts; `error` of a first-order effect is added."""

    def __init__(self, *, virtual: bool = True, error: Callable[[float], float] = lambda _: 0.0) -> None:
        self._virtual, self._error = virtual, error
        self.newest = self.live = self.most_live = 0
        self.forks: list[tuple[int, bool]] = []
        self.calls: list[tuple[int, int, Mode]] = []
        """Groups, version and mode of each virtual call."""
        self.rejects: Callable[[ShadowGroup], Exception | None] = lambda _: None

    @property
    @override
    def version(self) -> int:
        return self.newest

    @property
    @override
    def oldest(self) -> int:
        return self.newest - 1

    @property
    @override
    def steps_virtually(self) -> bool:
        return self._virtual

    @property
    @override
    def live_forks(self) -> int:
        return self.live

    async def pause(self) -> None:
        """Let all other rollouts go on."""
        for _ in range(5):
            await asyncio.sleep(0)

    @override
    async def fork(self, version: int, *, inherit: bool) -> ScriptedFork:
        self.forks.append((version, inherit))
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        return ScriptedFork(self)

    @override
    async def virtual(
        self, groups: Sequence[ShadowGroup], version: int, params: StepParams, mode: Mode
    ) -> list[tuple[ProbeDelta, ...]]:
        self.calls.append((len(groups), version, mode))
        for group in groups:
            if (error := self.rejects(group)) is not None:
                raise error
        return [tuple(self._effect(group, probe, mode) for probe in group.probes) for group in groups]

    def _effect(self, group: ShadowGroup, probe: ShadowText, mode: Mode) -> ProbeDelta:
        delta = float(group.train[0].tokens[0])
        return ProbeDelta.of(probe, delta + (self._error(delta) if mode == "first_order" else 0.0))

    @override
    async def close(self) -> None:
        pass
