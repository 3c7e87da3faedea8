"""Time slicing of one device between training and sampling.

Only one of the two workloads computes at a time; each waits for its turn before every micro-batch or decoding step. The
workload that holds the device keeps it for a time slice while it has work; then the other workload, if it is waiting,
gets a slice. A policy sets the length of the slices:

    latency      a training slice is one micro-batch and a sampling slice is three times as long: a decoding step waits
                 for one micro-batch at most, and few steps wait at all
    throughput   a training slice is two seconds and a sampling slice is as long: requests accumulate meanwhile, so
                 micro-batches and decoding steps are fuller

A turn is never interrupted, so a slice lasts at least one turn and neither workload starves.

`DeviceScheduler` slices the time of one process. Where two processes have room for the memory of one of them only,
`MemoryTurns` gives the device to one at a time; a handover moves gigabytes, so slices are longer there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from tinsmith.errors import EngineDied

Workload = Literal["training", "sampling"]
Sharing = Literal["latency", "throughput"]

LOOP_ITERATIONS = 4
"""Event-loop iterations before each turn, so that a request which has just arrived can wait for the device: its message
becomes a task, which creates a sampling task, which waits for a turn. An iteration takes 20 microseconds."""
IDLE_S = 0.5
"""Seconds without work after which the holder of `MemoryTurns` is done: a client sends its next request within them."""
_OTHER: dict[Workload, Workload] = {"training": "sampling", "sampling": "training"}


@dataclass(frozen=True, slots=True)
class SharingPolicy:
    """Lengths of the time slices while both workloads have work."""

    training_slice_s: float
    """Seconds of a training slice; at least one micro-batch."""
    sampling_ratio: float
    """Length of a sampling slice relative to the preceding training slice; at least one step."""
    micro_batch_share: float = 1.0
    """Fraction of `pass_tokens` in a micro-batch: smaller micro-batches release the device sooner."""
    handovers: float = 20.0
    """Length of a slice of `MemoryTurns`, relative to the handover before it: one part in so many of the time is
    lost."""


POLICIES: Mapping[Sharing, SharingPolicy] = {
    "latency": SharingPolicy(training_slice_s=0.0, sampling_ratio=3.0, micro_batch_share=1 / 2, handovers=4.0),
    "throughput": SharingPolicy(training_slice_s=2.0, sampling_ratio=1.0),
}


class DeviceScheduler:
    """Gives turns on the device of one engine. Runs in one event loop, which computing blocks, so it needs no lock."""

    def __init__(self, policy: SharingPolicy, clock: Callable[[], float] = time.perf_counter) -> None:
        self._policy, self._clock = policy, clock
        self._holder: Workload = "training"
        self._slice_s = self._slice_limit_s = self._turn_s = 0.0
        """Seconds: of the holder's slice so far, of the slice before the other workload may take over, of the last
        turn."""
        self._waiting: set[Workload] = set()
        self.turns = 0
        """Number of finished turns."""

    @asynccontextmanager
    async def turn(self, workload: Workload) -> AsyncIterator[None]:
        """Wait for the device; time inside the block counts towards the workload's slice."""
        other = _OTHER[workload]
        self._waiting.add(workload)
        try:
            for _ in range(LOOP_ITERATIONS):
                await asyncio.sleep(0)
            while other in self._waiting and self._next() is other:  # noqa: ASYNC110 - the other task is runnable
                await asyncio.sleep(0)
        finally:
            self._waiting.discard(workload)
        if self._holder is not workload:
            self._start_slice(workload)
        start = self._clock()
        try:
            yield
        finally:
            self._turn_s = self._clock() - start
            self._slice_s += self._turn_s
            self.turns += 1

    def _next(self) -> Workload:
        """The workload that gets the next turn if both are waiting."""
        return self._holder if self._slice_s < self._slice_limit_s else _OTHER[self._holder]

    def _start_slice(self, workload: Workload) -> None:
        """Hand the device over. Time that training used while sampling was idle earns sampling no longer slice."""
        training_s = self._policy.training_slice_s
        contested_s = min(self._slice_s, training_s + self._turn_s)
        self._slice_limit_s = training_s if workload == "training" else self._policy.sampling_ratio * contested_s
        self._holder, self._slice_s = workload, 0.0


class MemoryTurns:
    """Gives a device to one of two processes at a time, each of which frees its memory there for the other.

    While the other one has work, the holder keeps the device for a slice, or until it has been idle for IDLE_S. A turn
    is never interrupted, except one that is `pausable`: its process pauses its work while it does not hold the device.
    """

    def __init__(
        self,
        hand_over: Callable[[Workload], Awaitable[None]],
        policy: SharingPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hand_over` frees the memory of the holder and prepares the given workload. It must not raise."""
        self._hand_over, self._policy, self._clock = hand_over, policy, clock
        self._holder: Workload = "training"
        self._work: dict[Workload, int] = {"training": 0, "sampling": 0}
        """Turns that run or wait."""
        self._unbroken = 0
        """Running turns of the holder that are not pausable."""
        self._start = self._last_work = clock()
        self._slice_s = 0.0
        self._open: dict[Workload, asyncio.Event] = {"training": asyncio.Event(), "sampling": asyncio.Event()}
        """Set for the holder, while its next turns may begin."""
        self._changed = asyncio.Event()
        self._switching: asyncio.Task[None] | None = None
        self._is_closed = False

    @asynccontextmanager
    async def turn(self, workload: Workload, *, pausable: bool = False) -> AsyncIterator[None]:
        """Wait for the device; the process may use it inside the block. Raises EngineDied after `close`."""
        if self._switching is None and not self._is_closed:
            self._switching = asyncio.create_task(self._switch())
        self._work[workload] += 1
        self._changed.set()
        is_unbroken = False
        try:
            while not self._open[workload].is_set():
                await self._open[workload].wait()
            if self._is_closed:
                raise EngineDied("The engine was closed.", "Submit the request again.", from_outside=True)
            is_unbroken = not pausable
            self._unbroken += is_unbroken
            yield
        finally:
            self._unbroken -= is_unbroken
            self._work[workload] -= 1
            self._last_work = self._clock()
            self._changed.set()

    async def close(self) -> None:
        """Hand the device over no more; turns that wait fail."""
        self._is_closed = True
        if self._switching is not None:
            self._switching.cancel()
            await asyncio.wait([self._switching])
        for event in self._open.values():
            event.set()

    async def _switch(self) -> None:
        """Decide who has the device, whenever something changes or a slice ends."""
        while True:
            self._changed.clear()
            holder, other = self._holder, _OTHER[self._holder]
            left_s = self._left_s() if self._work[other] else None
            if left_s is None or left_s > 0:
                self._open[holder].set()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._changed.wait()
                continue
            self._open[holder].clear()
            if self._unbroken:
                await self._changed.wait()
                continue
            start = self._clock()
            await self._hand_over(other)
            self._holder, self._start = other, self._clock()
            self._slice_s = self._policy.handovers * (self._start - start)

    def _left_s(self) -> float:
        """Seconds until the holder must give the device away."""
        if self._work[self._holder]:
            return self._start + self._slice_s - self._clock()
        return self._last_work + IDLE_S - self._clock()
