"""Threads that compute at the same time, each on a share of a CPU's cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

MAX_AT_ONCE = 2
"""Micro-batches that are computed at the same time. Each needs memory for its activations."""


class ComputeThreads:
    """The calling thread and others, with the same number of PyTorch's threads for each.

    PyTorch divides each operator among its threads, which wait for each other after every one: a second core makes a
    pass of a small model only 1.2 to 1.5 times as fast, and two passes at the same time take as long as one of them.
    """

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        """Calls that run at the same time."""
        self._cores = torch.get_num_threads()
        self._share = max(1, self._cores // at_once)
        """PyTorch's threads for a call beside others."""
        self._pool = None
        if at_once > 1:
            self._pool = ThreadPoolExecutor(at_once - 1, "compute", torch.set_num_threads, (self._share,))

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make up to `at_once` calls, which must not raise: one on all cores, several at the same time."""
        if self._pool is None or len(calls) < 2:
            for call in calls:
                call()
            return
        others = [self._pool.submit(call) for call in calls[1:]]
        torch.set_num_threads(self._share)
        try:
            calls[0]()
        finally:
            torch.set_num_threads(self._cores)
            for other in others:
                other.result()
