"""Time slicing of one device between training and sampling.

Only one of the two workloads computes at a time; each waits for its turn before every micro-batch or decoding step. The
workload that holds the device keeps it for a time slice while it has work; then the other workload, if it is waiting,
gets a slice. A policy sets the length of the slices:

    latency      a training slice is one micro-batch and a sampling slice is three times as long: a decoding step waits
                 for one micro-batch at most, and few steps wait at all
    throughput   a training slice is two seconds and a sampling slice is as long: requests accumulate meanwhile, so
                 micro-batches and decoding steps are fuller

A turn is never interrupted, so a slice lasts at least one turn and neither workload starves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

Workload = Literal["training", "sampling"]
Sharing = Literal["latency", "throughput"]

LOOP_ITERATIONS = 4
"""Event-loop iterations before each turn, so that a request which has just arrived can wait for the device: its message
becomes a task, which creates a sampling task, which waits for a turn. An iteration takes 20 microseconds."""
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


POLICIES: Mapping[Sharing, SharingPolicy] = {
    "latency": SharingPolicy(training_slice_s=0.0, sampling_ratio=3.0, micro_batch_share=1 / 2),
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
