"""Sampling requests on their way into an engine: as many as it can run, in turns by tenant. No I/O.

An engine serves what it is given in the order of arrival, so what it cannot run yet waits here, in a line for each
tenant, and whenever something ends the next tenant's oldest goes in: a thousand requests of one tenant delay the
single one of another only until the engine has room for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tinsmith.engine.base import SampleRequest
from tinsmith.engine.sampling.capacity import MAX_SEQUENCES, cache_reserve

AT_HAND = 8
"""One part in so many beyond what the engine can run: it takes the next at once when something ends."""


@dataclass(eq=False, slots=True)
class _Place:
    owner: str
    answers: int
    tokens: int
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    inside: bool = False


class AdmissionQueue:
    """Of one engine."""

    def __init__(self, cache_tokens: int) -> None:
        self._most_tokens = cache_tokens + cache_tokens // AT_HAND
        self._most_answers = MAX_SEQUENCES + MAX_SEQUENCES // AT_HAND
        self._tokens = self._answers = 0
        self._lines: dict[str, deque[_Place]] = {}
        """The tenant whose turn it is comes first."""

    @asynccontextmanager
    async def admit(self, owner: str, request: SampleRequest) -> AsyncIterator[None]:
        """Wait for the request's turn; inside, it is the engine's."""
        place = _Place(owner, request.num_samples, cache_reserve(request))
        self._lines.setdefault(owner, deque()).append(place)
        self._let_in()
        try:
            await place.turn
            yield
        finally:
            self._leave(place)
            self._let_in()

    def waiting(self) -> dict[str, int]:
        """How many wait here, by tenant."""
        return {owner: len(line) for owner, line in self._lines.items()}

    def _let_in(self) -> None:
        while self._lines:
            owner = next(iter(self._lines))
            if not self._has_room(self._lines[owner][0]):
                return  # nobody overtakes: the one whose turn it is would wait for ever behind smaller ones
            self._enter(owner)

    def _has_room(self, place: _Place) -> bool:
        tokens, answers = self._tokens + place.tokens, self._answers + place.answers
        return not self._answers or (tokens <= self._most_tokens and answers <= self._most_answers)

    def _enter(self, owner: str) -> None:
        """The owner's oldest goes in, and its next one stands behind all other tenants'."""
        line = self._lines.pop(owner)
        place = line.popleft()
        if line:
            self._lines[owner] = line
        if place.turn.cancelled():  # given up a moment ago
            return
        self._tokens, self._answers = self._tokens + place.tokens, self._answers + place.answers
        place.inside = True
        place.turn.set_result(None)

    def _leave(self, place: _Place) -> None:
        line = self._lines.get(place.owner, deque())
        if place.inside:
            self._tokens, self._answers = self._tokens - place.tokens, self._answers - place.answers
        elif place in line:  # given up while it waited
            line.remove(place)
            if not line:
                del self._lines[place.owner]
