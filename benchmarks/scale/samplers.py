"""A sampler replica as arithmetic: continuous batching, prefill that pauses decoding, a prefix cache of blocks."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from benchmarks.scale.clock import now
from benchmarks.scale.hardware import Hardware
from tinsmith.engine.base import OnDelta, SampledSequence, SampleRequest, SampleResult, SavedAdapter
from tinsmith.engine.cluster.prefixes import Block, prompt_blocks
from tinsmith.engine.cluster.replica import Launch, SamplerProcess
from tinsmith.engine.sampling.capacity import MAX_SEQUENCES, cache_reserve
from tinsmith.errors import EngineDied

Lengths = Callable[[SampleRequest], list[int]]
"""Tokens of each answer of a request."""


class BlockCache:
    """Prefix blocks, least recently used first out. Without a limit it is the most that any cache could hold."""

    def __init__(self, tokens: int | None) -> None:
        self._limit = tokens
        self._blocks: OrderedDict[int, int] = OrderedDict()
        """Tokens of a block, by its hash."""
        self._tokens = 0

    def take(self, blocks: list[Block]) -> int:
        """Look up a prompt, then hold it; returns the tokens found."""
        hit = 0
        for end, value in blocks:
            if value not in self._blocks:
                break
            hit = end
        start = 0
        for end, value in blocks:
            if value in self._blocks:
                self._blocks.move_to_end(value)
            else:
                self._blocks[value] = end - start
                self._tokens += end - start
            start = end
        while self._limit is not None and self._tokens > self._limit:
            _, tokens = self._blocks.popitem(last=False)
            self._tokens -= tokens
        return hit


@dataclass(slots=True)
class PromptCounts:
    """Prompt tokens of all replicas, those found in their caches, and those that one endless cache would find."""

    tokens: int = 0
    hits: int = 0
    most: int = 0
    endless: BlockCache = field(default_factory=lambda: BlockCache(None))


@dataclass(eq=False, slots=True)
class _Job:
    request: SampleRequest
    lengths: list[int]
    done: asyncio.Future[float]
    """Time at which its decoding began."""
    left: int = 0
    began: float = 0.0


class SimulatedSampler:
    """The engine of an `engine.cluster.replica.SamplerProcess`."""

    def __init__(self, hardware: Hardware, lengths: Lengths, counts: PromptCounts) -> None:
        self.died = asyncio.Event()
        self.pid = 0
        self.attaching = 0
        self.busy_s = 0.0
        """Seconds in which it computed."""
        self.waits: dict[str, float] = {}
        """Seconds from the arrival of a request until its decoding began, by its id, until they are read."""
        self._hardware, self._lengths, self._counts = hardware, lengths, counts
        self._cache = BlockCache(hardware.cache_tokens)
        self._waiting: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._sequences = self._reserved = 0
        self._decoded = 0.0
        """Tokens that a sequence has had that runs since the start."""
        self._time = self._resume = now()
        self._ends: list[tuple[float, int, _Job]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether it computes."""
        return bool(self._sequences) or now() < self._resume

    @property
    def waiting(self) -> int:
        """Requests that it holds and does not compute."""
        return len(self._waiting)

    @property
    def sequences(self) -> int:
        """Running sequences."""
        return self._sequences

    async def attach(self, version: str, source: SavedAdapter) -> None:
        self.attaching += 1
        await asyncio.sleep(self._hardware.attach_s)
        self.attaching -= 1

    async def detach(self, version: str) -> None:
        """Nothing is kept of a version."""

    async def cancel(self, request_id: str) -> None:
        """No tenant cancels."""

    async def release_memory(self) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        self.die()

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        if self.died.is_set():
            raise EngineDied("The replica is dead.", from_outside=True)
        arrived = now()
        job = _Job(request, self._lengths(request), asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._advance()
        self._admit()
        self.waits[request.request_id] = await job.done - arrived
        return SampleResult(sequences=tuple(map(_sequence, job.lengths)))

    def die(self) -> None:
        """End the process; its requests fail."""
        self.died.set()
        if self._timer is not None:
            self._timer.cancel()
        for job in [*self._waiting, *self._running]:
            if not job.done.done():
                job.done.set_exception(EngineDied("The replica is dead.", from_outside=True))
        self._waiting.clear()
        self._running.clear()
        self._sequences = 0

    def _advance(self) -> None:
        """Decode up to now, at the speed of the sequences that run."""
        time = now()
        if self._sequences or self._time < self._resume:
            self.busy_s += (time if self._sequences else min(time, self._resume)) - self._time
        if self._sequences and time > self._resume:
            passed = time - max(self._time, self._resume)
            self._decoded += passed / self._hardware.decode_step(self._sequences)
        self._time = time

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            self._begin(self._waiting.popleft())
        self._plan()

    def _fits(self, job: _Job) -> bool:
        if not self._sequences:
            return True
        fits_cache = self._reserved + cache_reserve(job.request) <= self._hardware.cache_tokens
        return fits_cache and self._sequences + len(job.lengths) <= MAX_SEQUENCES

    def _begin(self, job: _Job) -> None:
        request = job.request
        blocks = prompt_blocks(request.prompt, (request.version, request.cache_scope))
        hit = self._cache.take(blocks)
        self._counts.tokens += len(request.prompt)
        self._counts.hits += hit
        self._counts.most += self._counts.endless.take(blocks)
        start = max(now(), self._resume)
        self._resume = start + (len(request.prompt) - hit) * self._hardware.prefill_per_token_s
        self._sequences += len(job.lengths)
        self._reserved += cache_reserve(request)
        self._running.add(job)
        job.left, job.began = len(job.lengths), self._resume
        for length in job.lengths:
            heapq.heappush(self._ends, (self._decoded + length, next(self._numbers), job))

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._decoded)
            at = max(now(), self._resume) + left * self._hardware.decode_step(self._sequences)
            self._timer = asyncio.get_running_loop().call_at(at, self._on_end)

    def _on_end(self) -> None:
        self._advance()
        self._timer = None
        while self._ends and self._ends[0][0] <= self._decoded + 1e-6:
            _, _, job = heapq.heappop(self._ends)
            self._sequences -= 1
            job.left -= 1
            if not job.left:
                self._running.discard(job)
                self._reserved -= cache_reserve(job.request)
                if not job.done.done():
                    job.done.set_result(job.began)
        self._admit()


def _sequence(length: int) -> SampledSequence:
    return SampledSequence(tokens=np.zeros(length, np.int32), logprobs=np.empty(0, np.float32), stop_reason="stop")


class SimulatedSlots:
    """Starts of replicas; `current[place]` is the process of a place."""

    def __init__(self, count: int, hardware: Hardware, lengths: Lengths, counts: PromptCounts) -> None:
        self.current: list[SimulatedSampler | None] = [None] * count
        self._hardware, self._lengths, self._counts = hardware, lengths, counts
        self._starts = [0] * count

    def launches(self) -> list[Launch]:
        """One for each place. The first start takes no time."""
        return [lambda place=place: self._launch(place) for place in range(len(self.current))]

    async def _launch(self, place: int) -> SamplerProcess:
        self.current[place] = None
        self._starts[place] += 1
        if self._starts[place] > 1:
            await asyncio.sleep(self._hardware.notice_s + self._hardware.load_s)
        process = self.current[place] = SimulatedSampler(self._hardware, self._lengths, self._counts)

        async def ended() -> str:
            await process.died.wait()
            return "simulated"

        return SamplerProcess(engine=process, ended=ended)
