"""Threads that compute at the same time, each on a share of a CPU's cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

MAX_AT_ONCE = 2
"""Micro-batches that are computed at the same time. Each needs memory for its activations."""
SMALL_WORK = 1 << 25
"""Positions times the model's parameters below which one of PyTorch's threads computes a pass. A second one gains
hardly anything there, and while it waits it takes a core from the other processes of the service."""


@contextmanager
def pytorch_threads(threads: int) -> Iterator[None]:
    """Within the context, operators that the current thread calls are computed by this many of PyTorch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(work: int) -> AbstractContextManager[None]:
    """Context in which a pass is computed: with one of PyTorch's threads if its work, positions times parameters, is
    small, else with all."""
    return pytorch_threads(1) if work < SMALL_WORK else nullcontext()


class ComputeThreads:
    """The calling thread and others, with the same number of PyTorch's threads for each.

    PyTorch divides each operator among its threads, which wait for each other after every one: a second core makes a
    pass of a small model only 1.2 to 1.5 times as fast, and two passes at the same time take as long as one of them.
    """

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        """Calls that run at the same time."""
        self._pool = ThreadPoolExecutor(at_once - 1, "compute") if at_once > 1 else None

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make up to `at_once` calls, which must not raise: one on all threads, several at the same time."""
        if self._pool is None or len(calls) < 2:
            for call in calls:
                call()
            return
        share = pytorch_threads(max(1, torch.get_num_threads() // self.at_once))
        others = [self._pool.submit(share(call)) for call in calls[1:]]
        try:
            share(calls[0])()
        finally:
            for other in others:
                other.result()
