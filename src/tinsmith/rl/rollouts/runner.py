"""Run groups of rollouts with time limits, retries and oversampling."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from tinsmith.rl.guards.user_code import Stuck, bounded, contained, describe, run_user_code
from tinsmith.rl.policy.request_limit import AttemptClock, RequestLimit
from tinsmith.rl.policy.sampling import Snapshot, request_seed
from tinsmith.rl.rollouts.failures import CANCELLED
from tinsmith.rl.types import Group, Rollout, Task
from tinsmith.rl.workflows.base import Workflow
from tinsmith.rl.workflows.group_scoring import GroupScoring
from tinsmith.rl.workflows.results import checked, fail_if_not_finite
from tinsmith.settings import Needs, Settings


class Oversampling(Settings):
    """Complete a batch without its slowest groups. Not used with sync.style: fixed, whose batches are reproducible."""

    ratio: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the groups that may be cancelled; 0 waits for all groups."""
    wait: Annotated[float, Needs("ratio")] = Field(default=30.0, ge=0)
    """Seconds to wait for the remaining groups after enough groups are complete, before they are cancelled."""
    partial: Annotated[bool, Needs("ratio")] = False
    """Keep the finished rollouts of a cancelled group, if any (see `split`); otherwise all of its rollouts fail."""


class RolloutConfig(Settings):
    """Limits and retries of rollouts."""

    concurrency: int | None = Field(default=None, ge=1)
    """Largest number of workflow calls at once; not set: no limit but that of requests, `concurrency` of the run."""
    timeout: float = Field(default=1800.0, gt=0)
    """Time limit of an attempt, in seconds, from its start. It stands still while all requests of the attempt wait for
    other requests, because of `concurrency` of the run."""
    timeout_ratio: float = Field(default=0.0, ge=0)
    """Cancel an attempt after this multiple of the mean time of successful attempts; 0 uses only `timeout`."""
    timeout_warmup: Annotated[int, Needs("timeout_ratio")] = Field(default=1, ge=1)
    """Batches before `timeout_ratio` applies."""
    retries: int = Field(default=0, ge=0)
    """Number of times to retry the failed rollouts of a group."""
    partial: Literal["keep", "drop"] = "keep"
    """If some rollouts of a group failed: `keep` the others, or `drop` the whole group."""
    split: int = Field(default=0, ge=0)
    """Rollouts of a group per workflow call; 0: all in one call, so that their prompt is computed once."""
    over: Oversampling = Oversampling()
    refills: int = Field(default=1, ge=0)
    """If every rollout of a batch failed: times to sample other tasks instead before the run ends with an error."""
    max_failures: float = Field(default=0.5, gt=0, le=1)
    """Share of failed rollouts in the last `failure_window` batches above which the run ends; 1: it never does."""
    failure_window: int = Field(default=20, ge=1)
    """Batches over which `max_failures` counts; before so many are sampled, it does not apply."""
    max_blocking: float = Field(default=300.0, gt=0)
    """Seconds for which code of a rollout may block all others, by code that is not async; then it is interrupted, and
    its rollout fails. A call into a C library is interrupted when it returns."""


@dataclass
class _GroupAttempt:
    """A group in progress, with a slot for each rollout."""

    task: Task
    seed: int
    slots: list[Rollout | None]
    version: int = 0
    ended: bool = False
    """Whether all attempts are over; False if the group was cancelled."""
    unscored: bool = False
    """Whether rewards that compare the rollouts are missing."""

    @property
    def open_slots(self) -> list[int]:
        """Indices of slots that are empty or failed."""
        return [index for index, rollout in enumerate(self.slots) if rollout is None or rollout.error]

    @property
    def has_success(self) -> bool:
        """Whether at least one rollout succeeded."""
        return len(self.open_slots) < len(self.slots)

    def to_group(self, *, require_all: bool) -> Group:
        """The current rollouts as a Group. With `require_all`, one failed rollout fails all of them."""
        slots = (None,) * len(self.slots) if self.unscored else self.slots
        rollouts = tuple(rollout or Rollout(error=CANCELLED) for rollout in slots)
        errors = [rollout.error for rollout in rollouts if rollout.error]
        if require_all and errors:
            error = f"dropped with its group: {errors[0]}"
            rollouts = tuple(rollout if rollout.error else rollout.failed(error) for rollout in rollouts)
        return Group(task=self.task, rollouts=rollouts, version=self.version)


class RolloutRunner:
    """Runs the rollouts of a run. Their requests take places of `requests`."""

    def __init__(self, config: RolloutConfig, requests: RequestLimit) -> None:
        self.config, self.requests = config, requests
        self._calls = asyncio.Semaphore(config.concurrency) if config.concurrency else nullcontext()
        self._batches = self._successes = 0
        self._success_seconds = 0.0

    @property
    def limit(self) -> float:
        """Current time limit of an attempt, in seconds."""
        config = self.config
        if not (config.timeout_ratio and self._successes and self._batches >= config.timeout_warmup):
            return config.timeout
        return min(config.timeout, config.timeout_ratio * self._success_seconds / self._successes)

    async def run_groups(
        self,
        workflow: Workflow,
        tasks: Sequence[Task],
        policy: Snapshot,
        *,
        size: int,
        seeds: Sequence[int],
        over: Oversampling | None = None,
        on_group: Callable[[int, Group], None] = lambda index, group: None,
    ) -> tuple[Group, ...]:
        """Run `size` rollouts of each task and return a group per task.

        An exception of the workflow becomes the `error` of its rollouts. `over` cancels the slowest groups. `on_group`
        receives each group that was not cancelled, with its index, as soon as it is finished.
        """
        attempts = [_GroupAttempt(task, seed, [None] * size) for task, seed in zip(tasks, seeds, strict=True)]
        drop = self.config.partial == "drop"
        groups: dict[int, Group] = {}

        async def run(index: int, attempt: _GroupAttempt) -> None:
            await self._run_group(workflow, attempt, policy)
            groups[index] = attempt.to_group(require_all=drop)
            on_group(index, groups[index])

        running = [asyncio.create_task(run(index, attempt)) for index, attempt in enumerate(attempts)]
        try:
            if over is not None and over.ratio:
                await _wait_for_enough(running, attempts, math.ceil((1 - over.ratio) * len(attempts)), over.wait)
            else:
                await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        self._batches += 1
        for index, attempt in enumerate(attempts):
            if index not in groups:  # cancelled, as one of the slowest
                groups[index] = attempt.to_group(require_all=over is None or not over.partial)
        return tuple(groups[index] for index in range(len(attempts)))

    async def _run_group(self, workflow: Workflow, group: _GroupAttempt, policy: Snapshot) -> None:
        group.version = policy.version
        scorer = workflow if isinstance(workflow, GroupScoring) and workflow.scores_group(group.task) else None
        group.unscored = scorer is not None
        for retry in range(self.config.retries + 1):
            slots = group.open_slots
            size = self.config.split or len(slots)
            calls = [slots[begin : begin + size] for begin in range(0, len(slots), max(1, size))]
            await asyncio.gather(
                *(
                    self._fill_slots(workflow, group, policy, call_slots, (retry, number))
                    for number, call_slots in enumerate(calls)
                )
            )
            if scorer is not None and group.has_success and not (group.open_slots and retry < self.config.retries):
                await self._score_group(scorer, group, policy)
            if not group.open_slots:
                break
        group.ended, group.unscored = True, False

    async def _score_group(self, scorer: GroupScoring, group: _GroupAttempt, policy: Snapshot) -> None:
        """Add the rewards that compare the rollouts, within the time limit of an attempt."""
        rollouts = tuple(rollout or Rollout(error=CANCELLED) for rollout in group.slots)
        clock = AttemptClock(self.config.timeout)

        async def attempt() -> tuple[Rollout, ...]:
            async with clock:
                limited = self.requests.around(policy, clock)
                return await scorer.score_group(group.task, rollouts, limited, seed=group.seed)

        try:
            scored = await bounded(attempt(), lambda: clock.expired)
        except (TimeoutError, Stuck):
            message = f"reward: timed out after {self.config.timeout:.3g} seconds"
            scored = tuple(each if each.error else each.failed(message) for each in rollouts)
        group.slots[:] = map(fail_if_not_finite, scored)

    async def _fill_slots(
        self, workflow: Workflow, group: _GroupAttempt, policy: Snapshot, slots: Sequence[int], call: tuple[int, int]
    ) -> None:
        """Fill `slots` by one workflow call; `call` is (retry, number). The first call uses the seed of the group."""
        seed = group.seed if call == (0, 0) else request_seed(group.seed, *call)
        async with self._calls:
            limit = self.limit
            clock = AttemptClock(limit)

            async def attempt() -> Any:
                async with clock:
                    limited = self.requests.around(policy, clock)
                    return await run_user_code(workflow.run(group.task, limited, count=len(slots), seed=seed))

            async def rolled_out() -> tuple[Rollout, ...]:
                rollouts = checked(await bounded(attempt(), lambda: clock.expired), len(slots))
                self._success_seconds += clock.seconds
                self._successes += 1
                return rollouts

            def failed(error: BaseException) -> tuple[Rollout, ...]:
                timed_out = isinstance(error, TimeoutError | Stuck) and clock.expired
                message = f"timed out after {limit:.3g} seconds" if timed_out else describe(error)
                return (Rollout(error=message, termination="timeout" if timed_out else "error"),) * len(slots)

            rollouts = await contained(rolled_out(), failed)
        for slot, rollout in zip(slots, rollouts, strict=True):
            group.slots[slot] = rollout


async def _wait_for_enough(
    running: Sequence[asyncio.Task[None]], attempts: Sequence[_GroupAttempt], count: int, wait: float
) -> None:
    """Wait for all groups, or until `wait` seconds after `count` of them succeeded."""
    pending: set[asyncio.Task[None]] = set(running)
    while pending and sum(attempt.ended and attempt.has_success for attempt in attempts) < count:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    if pending:
        await asyncio.wait(pending, timeout=wait)
