"""Running groups of rollouts: time limits, retries, and batches that do not wait for their slowest groups."""

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

CANCELLED = "cancelled: enough other groups were done"


class Oversampling(Settings):
    """Complete a batch without its slowest groups. Not in sync.style fixed, whose batches are the same in every run."""

    ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of the groups that may be left unfinished; 0 waits for all."""
    wait: Annotated[float, Needs("ratio")] = Field(default=30.0, ge=0)
    """Seconds that the slowest groups have after enough groups are done; then they are cancelled."""
    partial: Annotated[bool, Needs("ratio")] = False
    """Keep the finished rollouts of a cancelled group (there are some with `split`); otherwise all of them fail."""


class RolloutConfig(Settings):
    """Limits and retries of rollouts."""

    timeout: float = Field(default=1800.0, gt=0)
    """Time limit of one attempt, in seconds."""
    timeout_ratio: float = Field(default=0.0, ge=0)
    """Cancel an attempt after this multiple of the mean time of successful ones; 0: after `timeout` alone."""
    timeout_warmup: Annotated[int, Needs("timeout_ratio")] = Field(default=1, ge=1)
    """Batches before `timeout_ratio` applies."""
    retries: int = Field(default=0, ge=0)
    """Further attempts at the failed rollouts of a group."""
    partial: Literal["keep", "drop"] = "keep"
    """If some rollouts of a group failed: compare the others (`keep`), or fail the whole group (`drop`)."""
    split: int = Field(default=0, ge=0)
    """Rollouts of a group in one request; 0 is all of them, so that their prompt is computed once."""
    over: Oversampling = Oversampling()
    refills: int = Field(default=1, ge=0)
    """How often a batch in which every rollout failed is sampled again, from other tasks, before the run ends."""


@dataclass
class _GroupAttempt:
    """A group in progress, with a slot for each rollout."""

    task: Task
    seed: int
    slots: list[Rollout | None]
    version: int = 0
    ended: bool = False

    @property
    def open(self) -> list[int]:
        """Slots that are empty or failed."""
        return [at for at, rollout in enumerate(self.slots) if rollout is None or rollout.error]

    @property
    def good(self) -> bool:
        """Whether at least one rollout succeeded."""
        return len(self.open) < len(self.slots)

    def group(self, *, whole: bool) -> Group:
        """The group so far. With `whole`, one failed rollout fails all of them."""
        rollouts = tuple(rollout or Rollout(error=CANCELLED) for rollout in self.slots)
        faults = [rollout.error for rollout in rollouts if rollout.error]
        if whole and faults:
            error = f"left out with its group: {faults[0]}"
            rollouts = tuple(
                rollout if rollout.error else Rollout(turns=rollout.turns, error=error) for rollout in rollouts
            )
        return Group(task=self.task, rollouts=rollouts, version=self.version)


class RolloutRunner:
    """Runs every rollout of a run; `semaphore` bounds the number of requests in flight."""

    def __init__(self, config: RolloutConfig, semaphore: asyncio.Semaphore) -> None:
        self.config, self.semaphore = config, semaphore
        self._batches = self._good = 0
        self._seconds = 0.0

    @property
    def limit(self) -> float:
        """Current time limit of an attempt, in seconds."""
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
        """Run `size` rollouts for each task. A rollout fails alone, with its reason; `over` cancels slow groups."""
        attempts = [_GroupAttempt(task, seed, [None] * size) for task, seed in zip(tasks, seeds, strict=True)]
        running = [asyncio.create_task(self._group(workflow, attempt, policy)) for attempt in attempts]
        try:
            if over is not None and over.ratio:
                await _enough(running, attempts, math.ceil((1 - over.ratio) * len(attempts)), over.wait)
            else:
                await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        self._batches += 1
        drop = self.config.partial == "drop"
        return tuple(
            attempt.group(whole=drop if attempt.ended or over is None else not over.partial) for attempt in attempts
        )

    async def _group(self, workflow: Workflow, work: _GroupAttempt, policy: Snapshot) -> None:
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
        self, workflow: Workflow, work: _GroupAttempt, policy: Snapshot, slots: Sequence[int], place: tuple[int, int]
    ) -> None:
        """Fill `slots` with one call of the workflow. The first call of a group has the seed of the group."""
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
            except Exception as error:  # noqa: BLE001  any failure is recorded in the rollout
                late = isinstance(error, TimeoutError) and clock.expired()
                message = f"no end within {limit:.3g} seconds" if late else f"{type(error).__name__}: {error}"
                rollouts = (Rollout(error=message),) * len(slots)
        for slot, rollout in zip(slots, rollouts, strict=True):
            work.slots[slot] = rollout


async def _enough(
    running: Sequence[asyncio.Task[None]], attempts: Sequence[_GroupAttempt], count: int, wait: float
) -> None:
    """Wait for all groups, or until `wait` seconds after `count` of them succeeded."""
    left: set[asyncio.Task[None]] = set(running)
    while left and sum(attempt.ended and attempt.good for attempt in attempts) < count:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    if left:
        await asyncio.wait(left, timeout=wait)
