"""Shutdown of a service: no new work starts, running work is completed and written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tinsmith.service.sampling import Sampling
from tinsmith.service.training.worker import Worker


class Drain:
    """Waits for running work, once it has `started`."""

    def __init__(self, workers: Callable[[], list[Worker]], sampling: Sampling) -> None:
        self._workers = workers
        self._sampling = sampling
        self.started = False

    async def run(self, within_s: float) -> bool:
        """Drain; returns whether all running work completed in time. The next server resumes the rest."""
        self.started = True
        waits = [*(worker.drain() for worker in self._workers()), self._sampling.drain()]
        try:
            async with asyncio.timeout(within_s):
                await asyncio.gather(*waits)
        except TimeoutError:
            return False
        return True
