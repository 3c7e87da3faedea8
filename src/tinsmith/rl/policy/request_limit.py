"""The limit of concurrent requests to the server, and the rates of tokens.

Every request of a run for replies or logprobs takes a place of one RequestLimit: those of rollouts, evaluations,
judges, references and teachers. Requests without a place wait in order. Meanwhile the time limit of an attempt stands
still, so that a large batch does not time out because it is large.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from weakref import WeakSet

from tinsmith.rl.policy.sampling import Sample, SampleRequest, SampleResult, Snapshot


class AttemptClock:
    """Time limit of a block, as `asyncio.timeout`; it stands still while all requests of the block wait for a place."""

    def __init__(self, seconds: float) -> None:
        self._timeout = asyncio.timeout(seconds)
        self._open = False
        self._waiting = self._running = 0
        self._suspended = False
        self._paused: tuple[float, float] | None = None
        """Time at which the clock was paused, and the seconds that were left."""
        self._begin = self._pauses = 0.0

    @property
    def expired(self) -> bool:
        """Whether the limit ended the block."""
        return self._timeout.expired()

    @property
    def seconds(self) -> float:
        """Seconds since the block began, without pauses."""
        return asyncio.get_running_loop().time() - self._begin - self._pauses

    async def __aenter__(self) -> AttemptClock:
        await self._timeout.__aenter__()
        self._open, self._begin = True, asyncio.get_running_loop().time()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._open = False
        return await self._timeout.__aexit__(kind, error, trace)

    def count(self, *, waiting: int = 0, running: int = 0) -> None:
        """Add to the number of requests that wait for a place, and of those that have one."""
        self._waiting, self._running = self._waiting + waiting, self._running + running
        self._update()

    def suspend(self, suspended: bool) -> None:
        """Let the clock stand still, or run on."""
        self._suspended = suspended
        self._update()

    def _update(self) -> None:
        pause, end = self._suspended or (self._waiting > 0 and not self._running), self._timeout.when()
        if not self._open or self.expired or pause == (self._paused is not None):
            return
        now = asyncio.get_running_loop().time()
        if pause and end is not None:
            self._paused = now, end - now
            self._timeout.reschedule(None)
        elif self._paused is not None:
            begin, left = self._paused
            self._pauses, self._paused = self._pauses + now - begin, None
            self._timeout.reschedule(now + left)


class RequestLimit:
    """Places for concurrent requests to the server. Counts the tokens that they sample."""

    def __init__(self, size: int) -> None:
        """`size`: number of places."""
        self._places = asyncio.Semaphore(size)
        self._clocks = WeakSet[AttemptClock]()
        self._suspended = False
        self.sampled_tokens = 0
        """Tokens sampled up to now."""

    def suspend(self, suspended: bool) -> None:
        """Let all clocks stand still, because the server is away, or run on."""
        self._suspended = suspended
        for clock in self._clocks:
            clock.suspend(suspended)

    def around(self, snapshot: Snapshot, clock: AttemptClock | None = None) -> Snapshot:
        """The snapshot with its requests limited; `clock` stands still while they wait."""
        if clock is not None:
            self._clocks.add(clock)
            clock.suspend(self._suspended)

        async def limited(request: SampleRequest, sample: Sample) -> SampleResult:
            async with self.place(clock):
                result = await sample(request)
            self.sampled_tokens += sum(len(turn.tokens) for turn in result.turns)
            return result

        return snapshot.around_each_request(limited)

    @asynccontextmanager
    async def place(self, clock: AttemptClock | None) -> AsyncIterator[None]:
        """Wait for a place, and hold it for the duration of the block."""
        if clock is not None:
            clock.count(waiting=1)
        try:
            await self._places.acquire()
        finally:
            if clock is not None:
                clock.count(waiting=-1)
        if clock is not None:
            clock.count(running=1)
        try:
            yield
        finally:
            self._places.release()
            if clock is not None:
                clock.count(running=-1)


class TokenRates:
    """Tokens per second of wall time, since the previous call of `lap`: they hold at any staleness."""

    def __init__(self, requests: RequestLimit) -> None:
        self._requests = requests
        self._begin, self._sampled = time.perf_counter(), requests.sampled_tokens

    def lap(self, trained: float | None = None) -> dict[str, float]:
        """Rates of the tokens that were sampled and trained on (if `trained` is given) since the previous call."""
        now, total = time.perf_counter(), self._requests.sampled_tokens
        seconds, sampled = max(now - self._begin, 1e-9), total - self._sampled
        self._begin, self._sampled = now, total
        rates = {"speed/sampled_tokens_per_second": sampled / seconds} if total else {}
        return rates if trained is None else {**rates, "speed/trained_tokens_per_second": trained / seconds}
