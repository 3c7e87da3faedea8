"""The sampling side of a run: claims numbers of batches, draws their tasks, rolls them out, and stores them in order.

A sampler runs in the process of the trainer, or alone in a process of its own; several processes may sample for one
run, each under a name. `Sampler._may_start` says when a batch may be started, `weights.py` by which weights. A batch
in which every rollout failed is sampled again from other tasks a limited number of times; after that the run ends. How
a group is rolled out is in `runner.py`.

In style fixed with interval 1, at most `staleness` + 1 batches are outstanding: a batch is admitted when the step that
makes room for it was trained and its weights are published. So no batch is more than `staleness` updates old when it is
trained on, and none is discarded. With that many outstanding, this bound allows no other order than the oldest version
first: whoever trains on a newer group before an older one has more groups due at a later step than fit in it.
"""

from __future__ import annotations

import asyncio
import copy
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tinsmith.errors import TinsmithError
from tinsmith.plurals import counted
from tinsmith.rl.data.tasks import TaskSampler
from tinsmith.rl.ending.stop import StopSignal
from tinsmith.rl.policy.sampling import SamplingConfig, Snapshot, recomputing, request_seed
from tinsmith.rl.rollouts import store as stores
from tinsmith.rl.rollouts.batch import Batch, BatchInProgress
from tinsmith.rl.rollouts.failures import FailureLimit, errors_of, most_frequent
from tinsmith.rl.rollouts.filters import GroupFilters
from tinsmith.rl.rollouts.runner import RolloutRunner
from tinsmith.rl.rollouts.store import Claim, QueueState, SamplerState, Store, WeightRecord
from tinsmith.rl.rollouts.weights import OpenWeights, SyncConfig, WeightReader
from tinsmith.rl.types import Group
from tinsmith.rl.workflows.base import Workflow

_RESAMPLE_STREAM = 2
"""Separates the seeds of a batch that is sampled again from all others."""

_REFILL_STREAM = 3
"""Separates the seeds of groups that replace filtered ones."""


class TrainingEnded(Exception):
    """Training has ended; no further batch is needed."""

    def __init__(self, step: int) -> None:
        """`step` was the last one."""
        super().__init__(step)
        self.step = step


class NameTakenError(TinsmithError):
    """Another process samples under the name of this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """What to sample.

    Example: SamplingPlan(steps=60, groups=16, size=8, staleness=0, seed=0, sync=SyncConfig())
    """

    steps: int | None
    """Batches to sample; None: as many as training takes."""
    groups: int
    """Groups of a batch."""
    size: int
    """Rollouts of a group."""
    staleness: int
    seed: int
    sync: SyncConfig
    capacity: int = 16
    """Batches that may wait for training, in every style but fixed."""
    filters: GroupFilters = field(default_factory=lambda: GroupFilters(()))
    recomputes: Callable[[SamplingConfig], bool] = lambda sampling: False
    """Whether logprobs of replies sampled with these settings are computed again, at temperature 1."""
    filter_refills: int = 0
    """Further batches to sample, at most, until the filters keep `groups` groups; 0 takes what they keep."""
    min_partial: int = 0
    """Groups that must be solved in part."""
    is_partial: Callable[[Group], bool] = lambda group: False
    """Whether a group is solved in part."""


class Sampler:
    """Samples the batches of a run into its store."""

    def __init__(
        self,
        workflow: Workflow,
        tasks: TaskSampler,
        open_weights: OpenWeights,
        plan: SamplingPlan,
        runner: RolloutRunner,
        store: Store,
        *,
        timeout_hint: str,
        name: str | None = None,
        on_batch: Callable[[Batch, int], None] | None = None,
    ) -> None:
        """`name`: that of this process, of those that may sample for the run; None: the trainer's process samples
        alone. Then the position in the tasks is that of `tasks`; otherwise that of the store, and `tasks` only
        computes. `timeout_hint` says what to do when no weights are published. `on_batch` is called for each batch
        that this process has stored, with the number that all are done up to."""

        async def open_recomputing(record: WeightRecord) -> Snapshot:
            return (await open_weights(record)).around(recomputing(plan.recomputes))

        self._workflow, self._tasks, self._plan, self._runner, self._store = workflow, tasks, plan, runner, store
        self._alone, self._name, self._identity = name is None, name or "", "" if name is None else uuid.uuid4().hex
        self._timeout_hint, self._on_batch = timeout_hint, on_batch
        self._reader = WeightReader(open_recomputing)
        self._current: tuple[int, Snapshot] | None = None
        """Step and snapshot of the weights of the last batch."""
        self._current_for = 0
        """Batch that they were looked up for."""
        self._needed = 0
        """Step whose weights the next batch needs at least."""
        self._failures = FailureLimit(runner.config.max_failures, runner.config.failure_window)
        self._in_flight: dict[int, asyncio.Task[None]] = {}
        self._batches: dict[int, BatchInProgress] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._stopped = False
        self._busy = BusyTime()
        self.staleness = plan.staleness
        """Batches sampled ahead in style fixed; may be lowered for a while."""
        self.started = self.done = 0
        """Number of the last batch that this process has started, and of the last one that it has stored."""

    @property
    def fault(self) -> BaseException | None:
        """Error that stopped sampling, if any."""
        tasks = [task for task in (*self._in_flight.values(), *self._loops) if task.done()]
        return next((error for task in tasks if (error := task.exception()) is not None), None)

    @property
    def complete(self) -> bool:
        """Whether no further batch will be started."""
        return self.fault is not None or any(loop.done() for loop in self._loops)

    @property
    def busy_seconds(self) -> float:
        """Seconds in which a batch was being sampled, by the clock of the event loop."""
        return self._busy.seconds

    def in_progress(self, number: int) -> BatchInProgress | None:
        """Batch `number`, if it was started and is not stored yet."""
        return self._batches.get(number)

    async def join(self) -> int:
        """Take the name of this process, with the batches that an earlier process of that name has begun. Returns the
        number that all batches are done up to."""
        order = copy.deepcopy(self._tasks.state)
        state = await self._store.update(
            lambda state: state.with_sampler(
                self._name, owner=self._identity, state="under way", reason="", wants=None
            ).model_copy(update={"order": state.order or order})
        )
        return state.done

    async def leave(self) -> None:
        """Give up the name after the last batch. Raises NameTakenError if another process has it."""

        def leave(state: QueueState) -> QueueState:
            self._check_owner(state)
            return state.with_sampler(self._name, owner="", state="ended", reason="")

        await self._store.update(leave)

    async def report_failure(self, reason: str) -> None:
        """Let training know why sampling has failed. The batches in flight stay those of the name."""

        def fail(state: QueueState) -> QueueState | None:
            return state.with_sampler(self._name, state="failed", reason=reason) if self._owns_name(state) else None

        await self._store.update(fail)

    async def sample(self, stop: StopSignal, steps: int, ended_before: int = 0) -> None:
        """Sample until every batch is stored, in a process of its own.

        Raises TrainingEnded, StopRequested at `stop`, or the error that stopped sampling. If training had
        `ended_before` at an earlier step than `steps`, it may be restarted with more steps.
        """
        self._begin()
        while True:
            seen = self._store.changes
            stop.check()
            if (fault := self.fault) is not None:
                raise fault
            if self.complete and self.done == self.started:
                return
            ended_at = (await self._store.state()).ended_at
            if ended_at >= steps or ended_at not in (0, ended_before):
                raise TrainingEnded(ended_at)
            await self._store.wait(seen)

    async def start(self) -> None:
        """Sample in the background of the trainer's process.

        In style fixed, return when no batch can be started by the published weights: so the batches in flight at a
        step are the same in every run.
        """
        self._begin()
        while self._plan.sync.style == "fixed" and not self.complete:
            seen = self._store.changes
            if (await self._store.state()).published < self._needed:
                return
            await self._store.wait(seen)

    async def stop(self, grace: float) -> None:
        """Start no further batch, wait up to `grace` seconds for the batches in flight, and cancel the others."""
        self._stopped = True
        if self.fault is None and self._in_flight:
            await asyncio.wait(self._in_flight.values(), timeout=grace)
        await self.close()

    async def close(self) -> None:
        """Cancel the batches in flight."""
        tasks = [*self._in_flight.values(), *self._loops]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._in_flight.clear()
        self._loops.clear()

    def _begin(self) -> None:
        if not self._loops:
            self._loops.append(asyncio.create_task(self._start_batches(), name="batches"))
            if self._plan.sync.style == "live":
                self._loops.append(asyncio.create_task(self._follow_weights(), name="newest weights"))
            for loop in self._loops:
                loop.add_done_callback(lambda _: self._store.notify())

    async def _follow_weights(self) -> None:
        while True:
            seen = self._store.changes
            if weights := (await self._store.state()).weights:
                await self._reader.open(weights[-1])
            await self._store.wait(seen)

    async def _start_batches(self) -> None:
        while True:
            state = await self._store.state()
            number = min((own for own in state.claimed_by(self._name) if own > self.started), default=state.next)
            if self._plan.steps is not None and number > self._plan.steps:
                return
            step, snapshot = await self._weights_for(number)
            if not self._stopped and (batch := await self._claim(number)) is not None:
                task = asyncio.create_task(self._sample(batch, snapshot, step), name=f"rollouts of step {number}")
                self.started, self._in_flight[number], self._batches[number] = number, task, batch
                task.add_done_callback(lambda _: self._store.notify())

    def _may_start(self, number: int, published: int, taken: int, *, refreshes: bool) -> bool:
        """Whether batch `number` may be started: the difference between the styles.

        `published`: step of the newest weights. `taken`: batches that training has taken. `refreshes`: newer weights
        are due before the batch.
        """
        style, plan = self._plan.sync.style, self._plan
        if published < self._needed:
            return False
        if style != "fixed" and number - 1 - taken >= plan.capacity:
            return False
        return len(self._in_flight) < plan.sync.in_flight if style == "live" else not (refreshes and self._in_flight)

    async def _weights_for(self, number: int) -> tuple[int, Snapshot]:
        """Step and snapshot of the weights that sample batch `number`, when it may be started."""
        sync, offset, current = self._plan.sync, self._plan.staleness, self._current
        fixed, live = sync.style == "fixed", sync.style == "live"
        refreshes = bool(current) and not fixed and sync.refreshes_before(number, self._current_for, offset)
        self._current_for = number
        if fixed:  # never older ones, if staleness was lowered
            self._needed = max(current[0] if current else 0, sync.weights_for(number, self.staleness))
        self._store.notify()
        state = await self._state_when(
            lambda state: self._may_start(number, state.published, state.taken, refreshes=refreshes and not live),
            lambda state: f"No weights of step {self._needed}" if state.published < self._needed else "",
        )
        if current and refreshes and not live and state.published <= current[0]:
            state = await self._newer_weights(current[0])
        if fixed:
            record = next(record for record in state.weights if record.step >= self._needed)
        elif current is None or refreshes or live:
            record = state.weights[-1]
        else:
            return current
        snapshot = await self._reader.open(record)
        self._current = record.step, Snapshot.following(lambda: self._reader.newest) if live else snapshot
        return self._current

    async def _newer_weights(self, than: int) -> QueueState:
        """Request weights newer than those of step `than`. Returns when training has published some, or has none
        because it waits itself."""
        await self._store.update(lambda state: state.with_sampler(self._name, wants=than))
        return await self._state_when(
            lambda state: state.samplers[self._name].wants is None,
            lambda _: f"No weights newer than those of step {than}",
        )

    async def _state_when(
        self, ready: Callable[[QueueState], bool], lacking: Callable[[QueueState], str]
    ) -> QueueState:
        """Wait until `ready` holds. Raises TinsmithError if weights are lacking after the timeout."""
        timeout = self._plan.sync.timeout
        end = time.monotonic() + timeout
        while True:
            seen = self._store.changes
            state = await self._store.state()
            if not self._stopped and self.fault is None and ready(state):
                return state
            if (error := lacking(state)) and time.monotonic() > end:
                raise TinsmithError(f"{error} within {counted(timeout, 'second')}.", self._timeout_hint)
            await self._store.wait(seen)

    async def _claim(self, number: int) -> BatchInProgress | None:
        """Batch `number` with its tasks. None if another process has begun it."""
        state = await self._store.state()
        if number in state.claimed_by(self._name):  # of an earlier process of this name, or from a checkpoint
            return replace(state.claims[number].batch.copy(), began=time.time())
        if self._has_more_than_another(state):
            await asyncio.sleep(2 * stores.POLL_SECONDS)  # a process with fewer batches is quicker
        batch = BatchInProgress(step=number)

        def draw(state: QueueState) -> QueueState | None:
            self._check_owner(state)
            batch.tasks, batch.seeds, batch.groups = [], [], []
            return self._drawn(state, batch) if state.next == number else None

        await self._store.update(draw)
        return batch if batch.tasks else None

    async def _add(self, batch: BatchInProgress, *stream: int, replaces: bool = False) -> None:
        """Add other tasks to a batch, or with `replaces` replace its tasks. `stream` separates their seeds from those
        of its first tasks."""
        before = BatchInProgress(step=batch.step) if replaces else replace(batch)

        def draw(state: QueueState) -> QueueState:
            self._check_owner(state)
            batch.tasks, batch.seeds, batch.groups = [*before.tasks], [*before.seeds], [*before.groups]
            return self._drawn(state, batch, *stream)

        await self._store.update(draw)

    def _drawn(self, state: QueueState, batch: BatchInProgress, *stream: int) -> QueueState:
        """The state after drawing tasks for `batch`, to which they are added."""
        if not self._alone:
            self._tasks.restore(state.cursor, state.order)
        tasks = self._tasks.draw(self._plan.groups)
        batch.add(tasks, [request_seed(self._plan.seed, batch.step, group, *stream) for group in range(len(tasks))])
        begun = replace(batch, tasks=[*batch.tasks], seeds=[*batch.seeds], groups=[None] * len(batch.tasks))
        claim = Claim(sampler=self._name, batch=begun)
        changes: dict[str, Any] = {
            "next": max(state.next, batch.step + 1),
            "claims": {**state.claims, batch.step: claim},
        }
        if not self._alone:
            changes |= {"cursor": self._tasks.cursor, "order": self._tasks.state}
        return state.model_copy(update=changes)

    async def _put(self, batch: Batch) -> None:
        """Store a batch, which ends its claim. Orders that learn from rewards learn from it, if several may sample."""

        def close(state: QueueState) -> QueueState:
            self._check_owner(state)
            left = {number: claim for number, claim in state.claims.items() if number != batch.step}
            changes: dict[str, Any] = {"claims": left}
            if not self._alone:
                self._tasks.restore(state.cursor, state.order)
                self._tasks.update(batch.groups)
                changes["order"] = self._tasks.state
            return state.model_copy(update=changes)

        state = await self._store.update(close, [batch])
        if self._on_batch:
            self._on_batch(batch, state.done)

    def _has_more_than_another(self, state: QueueState) -> bool:
        """Whether another process of those that sample has begun fewer batches."""
        names = {name for name, sampler in state.samplers.items() if sampler.owner}
        counts = [len(state.claimed_by(name)) for name in names]
        return len(state.claimed_by(self._name)) > min(counts, default=0) if not self._alone else False

    def _owns_name(self, state: QueueState) -> bool:
        return state.samplers.get(self._name, SamplerState()).owner == self._identity

    def _check_owner(self, state: QueueState) -> None:
        if not self._owns_name(state):
            name = f"the name {self._name}" if self._name else "no name"
            raise NameTakenError(
                f"Another process of mode explore with {name} has taken over the batches of this one.",
                "Give each process of mode explore a name of its own, as in sampler=b.",
            )

    async def _sample(self, batch: BatchInProgress, snapshot: Snapshot, step: int) -> None:
        """Sample a batch, wait for all earlier ones of this process, and store it."""
        with self._busy:
            await self._roll_out(batch, snapshot)
            self._failures.add(batch.finished)
            while batch.failed:
                if batch.refills >= self._runner.config.refills:
                    raise _all_failed(batch)
                batch.refills += 1
                await self._add(batch, _RESAMPLE_STREAM, batch.refills, replaces=True)
                await self._roll_out(batch, snapshot)
                self._failures.add(batch.finished)
            await self._refill(batch, snapshot)
        numbers = {"sync/weights": float(step), **({"rollouts/refills": float(batch.refills)} if batch.refills else {})}
        if self._plan.filter_refills:
            numbers["filters/refills"] = float(batch.filter_refills)
        complete = batch.as_batch(numbers)
        await self._store.until(lambda: min(self._in_flight) == batch.step)
        await self._put(complete)
        self.done = batch.step
        del self._in_flight[batch.step], self._batches[batch.step]

    async def _refill(self, batch: BatchInProgress, snapshot: Snapshot) -> None:
        """Add groups of other tasks until the filters keep enough."""
        while self._plan.filter_refills and (missing := self._missing(batch.finished)):
            if batch.filter_refills >= self._plan.filter_refills:
                raise TinsmithError(
                    f"Step {batch.step}: {missing}.",
                    "Raise filter_refills (0 takes what is left), loosen filters, or choose tasks of another "
                    "difficulty.",
                )
            batch.filter_refills += 1
            await self._add(batch, _REFILL_STREAM, batch.filter_refills)
            await self._roll_out(batch, snapshot)

    def _missing(self, groups: Sequence[Group]) -> str:
        """What the groups of a step lack; empty if they are enough."""
        plan = self._plan
        left = plan.filters.remaining(groups)
        if len(left) < plan.groups:
            return f"the filters keep {len(left)} of {counted(len(groups), 'group')}, but a step needs {plan.groups}"
        if (partial := sum(map(plan.is_partial, left))) < plan.min_partial:
            return f"{partial} of {counted(len(left), 'group')} solved in part, but a step needs {plan.min_partial}"
        return ""

    async def _roll_out(self, batch: BatchInProgress, snapshot: Snapshot) -> None:
        """Roll out the tasks that have no group yet; each group is in the batch as soon as it is finished."""
        places = batch.open

        def finished(index: int, group: Group) -> None:
            batch.groups[places[index]] = group
            self._store.notify()

        over = self._runner.config.over if self._plan.sync.style != "fixed" else None
        groups = await self._runner.run_groups(
            self._workflow,
            [batch.tasks[place] for place in places],
            snapshot,
            size=self._plan.size,
            seeds=[batch.seeds[place] for place in places],
            over=over,
            on_group=finished,
        )
        for place, group in zip(places, groups, strict=True):
            batch.groups[place] = group


class BusyTime:
    """Seconds in which at least one of several blocks was entered, by the clock of the event loop."""

    def __init__(self) -> None:
        self._entered = 0
        self._since = self._seconds = 0.0

    def __enter__(self) -> None:
        if not self._entered:
            self._since = asyncio.get_running_loop().time()
        self._entered += 1

    def __exit__(self, *error: object) -> None:
        self._entered -= 1
        if not self._entered:
            self._seconds += asyncio.get_running_loop().time() - self._since

    @property
    def seconds(self) -> float:
        """Seconds up to now."""
        return self._seconds + (asyncio.get_running_loop().time() - self._since if self._entered else 0.0)


def _all_failed(batch: BatchInProgress) -> TinsmithError:
    earlier = f", as in {counted(batch.refills, 'batch')} before" if batch.refills else ""
    return TinsmithError(
        f"Every rollout of step {batch.step} failed{earlier}. {most_frequent(errors_of(batch.finished))}",
        "Fix the cause; if it was transient, raise rollout.retries and rollout.refills.",
    )
