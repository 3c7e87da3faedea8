"""How a group of rollouts is tried: time limits, further attempts, and going on without the slowest.

Leaves out when batches are begun, and by which weights (`rollouts.py`, `sync.py`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from tinsmith.rl.policy.base import Snapshot, request_seed
from tinsmith.rl.types import Group, Rollout, Task
from tinsmith.rl.workflows.base import Workflow, fail_if_not_finite
from tinsmith.settings import Needs, Settings

CANCELLED = "broken off: enough other groups were done"


class Oversampling(Settings):
    """A batch goes on without its slowest groups. Not in sync.style fixed, whose batches are the same in every run."""

    ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of groups that a batch can do without; 0 waits for all."""
    wait: Annotated[float, Needs("ratio")] = Field(default=30.0, ge=0)
    """Seconds that the others have once enough groups are there; then they are broken off."""
    partial: Annotated[bool, Needs("ratio")] = False
    """Keep what was done of a group broken off; else all of it counts as failed. With `split`, there is something."""


class RolloutConfig(Settings):
    """How rollouts are tried."""

    timeout: float = Field(default=1800.0, gt=0)
    """Seconds for one attempt."""
    timeout_ratio: float = Field(default=0.0, ge=0)
    """Break an attempt off after so many times the mean seconds of those that went well; 0 is only `timeout`."""
    timeout_warmup: Annotated[int, Needs("timeout_ratio")] = Field(default=1, ge=1)
    """Batches before `timeout_ratio` counts."""
    retries: int = Field(default=0, ge=0)
    """Further attempts at what failed of a group."""
    partial: Literal["keep", "drop"] = "keep"
    """A group in which some rollouts failed: compare the others, or count it as failed altogether."""
    split: int = Field(default=0, ge=0)
    """Rollouts of a group that are asked for together; 0 is all of them, so that their prompt is computed once."""
    over: Oversampling = Oversampling()
    refills: int = Field(default=1, ge=0)
    """How often a batch in which every rollout failed is sampled anew, from other tasks, before the run ends."""


@dataclass
class _Attempted:
    """A group under way: what is there of each of its rollouts."""

    task: Task
    seed: int
    slots: list[Rollout | None]
    version: int = 0
    ended: bool = False

    @property
    def open(self) -> list[int]:
        """Slots to fill: empty or failed."""
        return [at for at, rollout in enumerate(self.slots) if rollout is None or rollout.error]

    @property
    def good(self) -> bool:
        """Whether there is something to train on."""
        return len(self.open) < len(self.slots)

    def group(self, *, whole: bool) -> Group:
        """As it stands; a `whole` one fails with any of its rollouts."""
        rollouts = tuple(rollout or Rollout(error=CANCELLED) for rollout in self.slots)
        faults = [rollout.error for rollout in rollouts if rollout.error]
        if whole and faults:
            told = f"left out with its group: {faults[0]}"
            rollouts = tuple(one if one.error else Rollout(turns=one.turns, error=told) for one in rollouts)
        return Group(task=self.task, rollouts=rollouts, version=self.version)


class RolloutRunner:
    """Everyone who samples for a run asks here: at most `semaphore` requests are under way at a time."""

    def __init__(self, config: RolloutConfig, semaphore: asyncio.Semaphore) -> None:
        self.config, self.semaphore = config, semaphore
        self._batches = self._good = 0
        self._seconds = 0.0

    @property
    def limit(self) -> float:
        """Seconds for an attempt, now."""
        config = self.config
        if not (config.timeout_ratio and self._good and self._batches >= config.timeout_warmup):
            return config.timeout
        return min(config.timeout, config.timeout_ratio * self._seconds / self._good)

    async def run_groups(
        self,
        workflow: Workflow,
        tasks: Sequence[Task],
        policy: Snapshot,
        *,
        size: int,
        seeds: Sequence[int],
        over: Oversampling | None = None,
    ) -> tuple[Group, ...]:
        """A group of `size` rollouts for each task, each failing alone with its reason; `over` cuts the slowest."""
        works = [_Attempted(task, seed, [None] * size) for task, seed in zip(tasks, seeds, strict=True)]
        running = [asyncio.create_task(self._group(workflow, work, policy)) for work in works]
        try:
            if over is not None and over.ratio:
                await _enough(running, works, math.ceil((1 - over.ratio) * len(works)), over.wait)
            else:
                await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        self._batches += 1
        drop = self.config.partial == "drop"
        return tuple(work.group(whole=drop if work.ended or over is None else not over.partial) for work in works)

    async def _group(self, workflow: Workflow, work: _Attempted, policy: Snapshot) -> None:
        work.version = policy.version
        for attempt in range(self.config.retries + 1):
            slots = work.open
            each = self.config.split or len(slots)
            parts = [slots[begin : begin + each] for begin in range(0, len(slots), max(1, each))]
            await asyncio.gather(
                *(self._part(workflow, work, policy, part, (attempt, number)) for number, part in enumerate(parts))
            )
            if not work.open:
                break
        work.ended = True

    async def _part(
        self, workflow: Workflow, work: _Attempted, policy: Snapshot, slots: Sequence[int], place: tuple[int, int]
    ) -> None:
        """Fills `slots` by one call of the workflow; the first call of a group has the group's own seed."""
        seed = work.seed if place == (0, 0) else request_seed(work.seed, *place)
        async with self.semaphore:
            begin, limit = time.perf_counter(), self.limit
            clock = asyncio.timeout(limit)
            try:
                async with clock:
                    rollouts = await workflow.run(work.task, policy, count=len(slots), seed=seed)
                rollouts = tuple(map(fail_if_not_finite, rollouts))
                self._seconds += time.perf_counter() - begin
                self._good += 1
            except Exception as error:  # noqa: BLE001  whatever fails, here or at the server, is the rollout's to tell
                late = isinstance(error, TimeoutError) and clock.expired()
                told = f"no end within {limit:.3g} seconds" if late else f"{type(error).__name__}: {error}"
                rollouts = (Rollout(error=told),) * len(slots)
        for slot, rollout in zip(slots, rollouts, strict=True):
            work.slots[slot] = rollout


async def _enough(running: Sequence[asyncio.Task[None]], works: Sequence[_Attempted], count: int, wait: float) -> None:
    """Returns when all are done, or `wait` seconds after `count` of them have something to train on."""
    left: set[asyncio.Task[None]] = set(running)
    while left and sum(work.ended and work.good for work in works) < count:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    if left:
        await asyncio.wait(left, timeout=wait)
