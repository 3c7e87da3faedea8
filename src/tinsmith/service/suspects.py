"""Samples that were under way when engines died: which of them does it?

Many are under way at once, and most are innocent: they are lost, and their clients send them again. What was there when
two engines died goes by itself from then on, and what is there when a third one dies is refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from tinsmith.engine.base import SampleRequest
from tinsmith.errors import EngineDied, EngineError
from tinsmith.service.engines import DEATHS, EngineHost


class Suspects:
    """Counts deaths by what was asked, since a sample that is sent again has another id. One that succeeds is clear."""

    def __init__(self) -> None:
        self._deaths: dict[int, tuple[int, int]] = {}
        """What was asked -> how many engines died, and which start was the last of these."""

    @asynccontextmanager
    async def trial(self, host: EngineHost, session: str, request: SampleRequest) -> AsyncIterator[None]:
        """The sample is under way inside. Raises EngineError for one that is refused."""
        asked = hash(
            (request.space, session, request.version, request.prompt.tobytes(), request.max_tokens, request.num_samples)
        )
        async with host.trials if self._count(asked) == DEATHS - 1 else nullcontext():
            self._refuse(asked)
            try:
                yield
            except EngineDied:
                if self._deaths.get(asked, (0, 0))[1] != host.starts:  # a group asks the same many times
                    self._deaths[asked] = self._count(asked) + 1, host.starts
                self._refuse(asked)
                raise
        self._deaths.pop(asked, None)

    def _count(self, asked: int) -> int:
        return self._deaths.get(asked, (0, 0))[0]

    def _refuse(self, asked: int) -> None:
        if self._count(asked) >= DEATHS:
            what = f"The engine died {DEATHS} times while it sampled this."
            raise EngineError(what, "Send a shorter prompt, or ask for fewer tokens.")
