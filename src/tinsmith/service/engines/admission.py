"""Admission of sampling requests to an engine: as many as it can run, tenants in turn. No I/O.

An engine serves its requests in the order of arrival. What it cannot run yet waits here, in one queue per tenant;
whenever a request ends, the next tenant's oldest is admitted. A thousand requests of one tenant delay the single
request of another only until the engine has capacity for it.

A request with many samples is admitted in parts, which take their turns like requests. While one that does not fit is
next, those of other tenants pass it, until they have taken as much as a part.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import chain

from tinsmith.engine.base import SampleRequest
from tinsmith.engine.sampling.capacity import MAX_SEQUENCES, cache_reserve
from tinsmith.service.engines.queue_view import Throughput

EXTRA_FRACTION = 8
"""One part in EXTRA_FRACTION is admitted beyond the engine's capacity, so that it can start the next at once."""
PARTS = 4
"""A part of a request takes at most one part in PARTS of the engine's capacity."""


@dataclass(eq=False, slots=True)
class AdmissionTicket:
    """A request, or a part of one, that waits or runs."""

    owner: str
    request_id: str
    sequences: int
    tokens: int
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    admitted: bool = False
    passed_tokens: int = 0
    """Cache tokens of later requests that were admitted while this one was next and did not fit."""
    passed_sequences: int = 0


class AdmissionQueue:
    """The waiting and running sampling requests of one engine."""

    def __init__(self, cache_tokens: int) -> None:
        self._cache_tokens, self._samplers = cache_tokens, 1
        self._max_tokens = self._max_sequences = 0
        self._tokens = self._sequences = 0
        self.state_tokens = 0
        """Cache tokens that the recurrent states of a sequence are worth, once the model is loaded."""
        self._queues: dict[str, deque[AdmissionTicket]] = {}
        """Waiting requests by tenant; the tenant whose turn it is comes first."""
        self._running: dict[AdmissionTicket, None] = {}
        self.throughput = Throughput()
        self.resize(1)

    def resize(self, samplers: int) -> None:
        """Admit as much as `samplers` processes can run. What runs already stays; a part of a request, which one
        process samples, keeps its size."""
        self._samplers = samplers
        self._max_tokens = samplers * (self._cache_tokens + self._cache_tokens // EXTRA_FRACTION)
        self._max_sequences = samplers * (MAX_SEQUENCES + MAX_SEQUENCES // EXTRA_FRACTION)
        self._admit_waiting()

    def set_cache_tokens(self, cache_tokens: int) -> None:
        """Take the capacity of a process from its engine, once it is loaded."""
        self._cache_tokens = cache_tokens
        self.resize(self._samplers)

    def parts(self, request: SampleRequest) -> list[SampleRequest]:
        """Requests for a part of the samples each, to be admitted one by one; only the first is for the prompt too."""
        count = min(request.num_samples, MAX_SEQUENCES // PARTS)
        part_tokens = self._cache_tokens // PARTS
        while count > 1 and self.reserve(replace(request, num_samples=count)) > part_tokens:
            count //= 2
        first = replace(request, num_samples=count)
        rest = replace(
            request,
            prompt_logprobs=False,
            topk_prompt_logprobs=0,
            target_prompt_logprobs=None,
            prompt_alt_tokens_k=0,
        )
        return [first] + [
            replace(
                rest,
                request_id=f"{request.request_id}/{start}",
                first_sample=start,
                num_samples=min(count, request.num_samples - start),
            )
            for start in range(count, request.num_samples, count)
        ]

    @asynccontextmanager
    async def admit(self, owner: str, request: SampleRequest) -> AsyncIterator[None]:
        """Wait until the request is admitted. It counts as running for the duration of the block."""
        ticket = AdmissionTicket(owner, request.request_id, request.num_samples, self.reserve(request))
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

    def tickets(self) -> dict[str, AdmissionTicket]:
        """The waiting and running requests by id; a request in parts has one for each part that has not ended."""
        return {ticket.request_id: ticket for ticket in chain(self._running, *self._queues.values())}

    def reserve(self, request: SampleRequest) -> int:
        """Cache tokens that a request takes."""
        return cache_reserve(request, self.state_tokens)

    def _admit_waiting(self) -> None:
        while (owner := self._next_owner()) is not None:
            self._admit_oldest(owner)

    def _next_owner(self) -> str | None:
        """The tenant in turn or, while its oldest request does not fit, the next one whose request may pass it."""
        head: AdmissionTicket | None = None
        for owner, queue in self._queues.items():
            ticket = queue[0]
            if self._fits(ticket) and (head is None or self._may_pass(ticket, head)):
                return owner
            head = head or ticket
        return None

    def _fits(self, ticket: AdmissionTicket) -> bool:
        tokens, sequences = self._tokens + ticket.tokens, self._sequences + ticket.sequences
        return not self._sequences or (tokens <= self._max_tokens and sequences <= self._max_sequences)

    def _may_pass(self, ticket: AdmissionTicket, head: AdmissionTicket) -> bool:
        """Whether a request may be admitted before the one in turn; it is then counted."""
        tokens, sequences = head.passed_tokens + ticket.tokens, head.passed_sequences + ticket.sequences
        if tokens > self._cache_tokens // PARTS or sequences > MAX_SEQUENCES // PARTS:
            return False  # otherwise a large request would wait forever while smaller ones pass it
        head.passed_tokens, head.passed_sequences = tokens, sequences
        return True

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
        self._running[ticket] = None
        self.throughput.start(time.monotonic())
        ticket.turn.set_result(None)

    def _leave(self, ticket: AdmissionTicket) -> None:
        queue = self._queues.get(ticket.owner, deque())
        if ticket.admitted:
            self._tokens, self._sequences = self._tokens - ticket.tokens, self._sequences - ticket.sequences
            del self._running[ticket]
            self.throughput.end(ticket.tokens, time.monotonic())
        elif ticket in queue:  # cancelled while it waited
            queue.remove(ticket)
            if not queue:
                del self._queues[ticket.owner]
