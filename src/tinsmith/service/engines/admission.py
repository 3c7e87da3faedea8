"""Admission of sampling requests to an engine: as many as it can run, tenants in turn. No I/O.

An engine serves its requests in the order of arrival. What it cannot run yet waits here, in one queue per tenant;
whenever a request ends, the next tenant's oldest is admitted. A thousand requests of one tenant delay the single
request of another only until the engine has capacity for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tinsmith.engine.base import SampleRequest
from tinsmith.engine.sampling.capacity import MAX_SEQUENCES, cache_reserve

EXTRA_FRACTION = 8
"""One part in EXTRA_FRACTION is admitted beyond the engine's capacity, so that it can start the next at once."""


@dataclass(eq=False, slots=True)
class _Ticket:
    owner: str
    sequences: int
    tokens: int
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    admitted: bool = False


class AdmissionQueue:
    """The waiting and running sampling requests of one engine."""

    def __init__(self, cache_tokens: int) -> None:
        self._max_tokens = cache_tokens + cache_tokens // EXTRA_FRACTION
        self._max_sequences = MAX_SEQUENCES + MAX_SEQUENCES // EXTRA_FRACTION
        self._tokens = self._sequences = 0
        self._queues: dict[str, deque[_Ticket]] = {}
        """Waiting requests by tenant; the tenant whose turn it is comes first."""

    @asynccontextmanager
    async def admit(self, owner: str, request: SampleRequest) -> AsyncIterator[None]:
        """Wait until the request is admitted. It counts as running for the duration of the block."""
        ticket = _Ticket(owner, request.num_samples, cache_reserve(request))
        self._queues.setdefault(owner, deque()).append(ticket)
        self._admit_waiting()
        try:
            await ticket.turn
            yield
        finally:
            self._leave(ticket)
            self._admit_waiting()

    def waiting(self) -> dict[str, int]:
        """Number of waiting requests by tenant."""
        return {owner: len(queue) for owner, queue in self._queues.items()}

    def _admit_waiting(self) -> None:
        while self._queues:
            owner = next(iter(self._queues))
            if not self._fits(self._queues[owner][0]):
                return  # no overtaking: a large request would wait forever while smaller ones pass it
            self._admit_oldest(owner)

    def _fits(self, ticket: _Ticket) -> bool:
        tokens, sequences = self._tokens + ticket.tokens, self._sequences + ticket.sequences
        return not self._sequences or (tokens <= self._max_tokens and sequences <= self._max_sequences)

    def _admit_oldest(self, owner: str) -> None:
        """Admit the owner's oldest request and put the owner's queue last."""
        queue = self._queues.pop(owner)
        ticket = queue.popleft()
        if queue:
            self._queues[owner] = queue
        if ticket.turn.cancelled():  # cancelled a moment ago
            return
        self._tokens, self._sequences = self._tokens + ticket.tokens, self._sequences + ticket.sequences
        ticket.admitted = True
        ticket.turn.set_result(None)

    def _leave(self, ticket: _Ticket) -> None:
        queue = self._queues.get(ticket.owner, deque())
        if ticket.admitted:
            self._tokens, self._sequences = self._tokens - ticket.tokens, self._sequences - ticket.sequences
        elif ticket in queue:  # cancelled while it waited
            queue.remove(ticket)
            if not queue:
                del self._queues[ticket.owner]
