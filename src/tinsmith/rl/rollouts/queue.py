"""The queue of batches between sampling and training, as training uses it.

Training takes batches from the store (`store.py`), which a sampler fills in this process or in others (`sampler.py`),
and publishes weights, which say how far sampling may go (`weights.py`). Which batch is next is in `replay.py`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from typing_extensions import override

from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.plurals import counted
from tinsmith.rl.ending.stop import StopSignal
from tinsmith.rl.policy.trainer import Trainer
from tinsmith.rl.rollouts.batch import Batch, BatchInProgress, succeeded
from tinsmith.rl.rollouts.replay import BatchSelector, SelectorState
from tinsmith.rl.rollouts.sampler import Sampler
from tinsmith.rl.rollouts.store import Claim, QueueState, Store
from tinsmith.rl.rollouts.weights import SyncConfig, WeightPublisher
from tinsmith.rl.types import Group
from tinsmith.settings import Settings


class SavedQueue(Settings):
    """State of a queue in state.json."""

    reading: SelectorState = SelectorState()
    sampled: int = 0
    """Batches sampled."""
    batches: tuple[Batch, ...] = ()
    """Batches that wait, if the store does not outlive the process."""
    unfinished: tuple[BatchInProgress, ...] = ()
    """Batches that were started and are not complete: their tasks and finished groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePosition:
    """How far training and sampling are at a moment.

    Example: QueuePosition(reading=SelectorState(next=4), used=frozenset({1, 2, 3}), started=5)
    """

    reading: SelectorState = field(default_factory=SelectorState)
    used: frozenset[int] = frozenset()
    """Batches that are used up and still stored."""
    started: int = 0
    """Number of the last batch that was started in this process."""


class BatchQueue:
    """Batches from a store, sampled by weights that this side publishes."""

    def __init__(
        self,
        store: Store,
        selector: BatchSelector,
        policy: Trainer,
        publisher: WeightPublisher,
        sync: SyncConfig,
        *,
        last_step: int,
        sampler: Sampler | None = None,
        stop: StopSignal | None = None,
    ) -> None:
        """`sampler` fills the store in this process; if it is None, other processes do."""
        self._store, self._selector, self._policy = store, selector, policy
        self._publisher, self._sync, self._sampler = publisher, sync, sampler
        self._last_step, self._stop = last_step, stop or StopSignal()
        self._staleness = sampler.staleness if sampler is not None else 0

    async def next(self, step: int) -> Batch:
        """The batch that `step` trains on. Raises TinsmithError if there will be none, and StopRequested if the run is
        to stop.

        In one process, raises the error that stopped sampling: at once if old batches can be reused, which never run
        out, else when the batches sampled before the error are used up. With several processes, also raises
        TinsmithError if sampling has ended or no batch comes within the timeout.
        """
        trained, end = step - 1, time.monotonic() + self._sync.timeout
        await self._begin(trained)
        while True:
            self._stop.check()
            seen = self._store.changes
            state = await self._store.state()  # before the batches: those stored before sampling ended are there
            fault = self._fault(state)
            batch = None if fault is not None and self._selector.reuses else await self._take(step, state)
            if batch is not None:
                return batch
            if fault is not None:
                raise fault
            if self._sampler is None:
                self._check_other_processes(step, state, end)
            await self._answer_requests(trained)
            await self._store.wait(seen)

    async def stream(self, step: int, size: int) -> AsyncIterator[dict[int, Group]]:
        """Groups of the batch of `step` by their place in it, `size` at a time as they finish, until fewer are left.

        `next` then returns the whole batch. Nothing is streamed if another process samples, or if batches may be
        dropped or used again.
        """
        if (sampler := self._sampler) is None or not self._selector.keeps_order:
            return
        await self._begin(step - 1)
        number, streamed = self._selector.taken + 1, set[int]()
        while sampler.fault is None and (batch := sampler.in_progress(number)) is not None:
            self._stop.check()
            seen = self._store.changes
            finished = {at: group for at, group in enumerate(batch.groups) if group is not None and succeeded(group)}
            ready = sorted(finished.keys() - streamed)[:size]
            if len(ready) == size:
                streamed.update(ready)
                yield {at: finished[at] for at in ready}
            elif batch.open:
                await self._store.wait(seen)
            else:
                return

    async def publish(self, step: int) -> None:
        """Publish the weights of `step`, which was trained, if they are due. Sampling goes on by them.

        Call `position` before, if the step is to be saved.
        """
        match self._sync.style:
            case "fixed":
                wanted = self._sampler is None or not (self._publishes_late or self._sampler.complete)
                due = wanted and step % self._sync.interval == 0
            case "on_demand":
                due = (await self._store.state()).wanted
            case _:
                due = step % self._sync.publish_interval == 0
        if due:
            await self._publisher.publish(step)
        if self._sampler is None and step == self._last_step:
            await self._report(ended_at=step)

    def limit_staleness(self, limit: int | None) -> None:
        """Sample at most `limit` batches ahead from the next one on, in style fixed; None: as many as the run sets."""
        if self._sampler is not None:
            self._sampler.staleness = self._staleness if limit is None else min(limit, self._staleness)

    async def stop(self, grace: float) -> None:
        """Start no further batch, wait up to `grace` seconds for the batches in flight, and cancel the others."""
        if self._sampler is not None:
            await self._sampler.stop(grace)

    def position(self) -> QueuePosition:
        """The position from which a checkpoint of this moment resumes."""
        started = self._sampler.started if self._sampler is not None else 0
        return QueuePosition(reading=self._selector.state, used=self._selector.done, started=started)

    def complete_up_to(self, position: QueuePosition) -> bool:
        """Whether the batches started before `position` are complete, so that a resumed run has the same ones."""
        sampler = self._sampler
        return sampler is None or sampler.done >= position.started or sampler.fault is not None

    async def state_at(self, position: QueuePosition) -> SavedQueue:
        """The state to resume from at `position`. Batches that are not complete are stored as far as they are."""
        if (sampler := self._sampler) is None:
            return SavedQueue(reading=position.reading)
        sampled = min(sampler.done, position.started)
        started = [sampler.in_progress(number) for number in range(sampled + 1, position.started + 1)]
        unfinished = tuple(batch.copy() for batch in started if batch is not None)
        waiting = () if self._store.durable else sorted(await self._store.numbers())
        wanted = [number for number in waiting if number <= sampled and number not in position.used]
        batches = [await self._store.get(number) for number in wanted]
        return SavedQueue(reading=position.reading, sampled=sampled, batches=tuple(batches), unfinished=unfinished)

    async def state_saved(self, position: QueuePosition) -> None:
        """Report that the state at `position` is on disk: batches that were used up then may be deleted."""
        used = set(position.used)
        if self._sampler is None and not self._selector.replays:
            # used by a process that was killed before it deleted them
            used.update(number for number in await self._store.numbers() if number < position.reading.next)
        await self._selector.clear(used)

    @property
    def busy_seconds(self) -> float | None:
        """Seconds in which this process sampled a batch, by the clock of the event loop; None if it samples none."""
        return self._sampler.busy_seconds if self._sampler is not None else None

    async def restore(self, saved: SavedQueue) -> None:
        """Load a captured state.

        In one process, batches started after the state was captured are sampled again, and those that were not
        complete are completed by the weights of the checkpoint.
        """
        self._selector.restore(saved.reading)
        if self._sampler is None:
            await self._check_next_is_there()
            return
        self._sampler.started = self._sampler.done = saved.sampled
        claims = {batch.step: Claim(sampler="", batch=batch) for batch in saved.unfinished}
        state = QueueState(next=max(claims, default=saved.sampled) + 1, claims=claims)
        await self._store.update(lambda _: state, saved.batches)
        await self._store.drop([number for number in await self._store.numbers() if number > saved.sampled])

    async def close(self) -> None:
        """Cancel the batches in flight and close the store."""
        if self._sampler is not None:
            await self._sampler.close()
        await self._store.close()

    async def _check_next_is_there(self) -> None:
        """Raise ConfigError if the store is that of another run, which has used the next batch."""
        number = self._selector.taken + 1
        state = await self._store.state()  # before the numbers
        if not self._selector.replays and state.is_closed(number) and number not in await self._store.numbers():
            raise ConfigError(
                f"Batch {number} is not in the buffer any more: another run or a later state has used it.",
                "Set another buffer.run or buffer.path for a new run; to resume a run, use its folder.",
            )

    async def _begin(self, trained: int) -> None:
        """Publish the weights of step `trained` if they are due, and let sampling go on."""
        late = self._publishes_late and trained % self._sync.interval == 0 and self._publisher.newest_step != trained
        if late or self._publisher.newest_step < 0:
            await self._publisher.publish(trained)
        await self._report()
        if self._sampler is not None:
            await self._sampler.start()

    @property
    def _publishes_late(self) -> bool:
        """Whether weights are published when the next step begins instead of right after training.

        Synchronous runs in one process do so: nothing is sampled while they evaluate and save, so that evaluations and
        rollouts use shared values and random generators one after the other, as after a resume.
        """
        return self._sampler is not None and self._sync.style == "fixed" and not self._staleness

    def _fault(self, state: QueueState) -> BaseException | None:
        if self._sampler is not None:
            return self._sampler.fault
        if reason := state.failure:
            return TinsmithError(
                f"The process that samples failed: {reason}", "Fix the cause, and start both processes again."
            )
        return None

    async def _take(self, step: int, state: QueueState) -> Batch | None:
        """The next batch if there is one. Sampling learns of every batch taken, also of those that are dropped."""
        is_last = self._sync.style == "fixed" and state.done >= step  # the next one needs weights of a later step
        taken = self._selector.taken
        batch = await self._selector.take(self._policy.version, again=is_last)
        if self._selector.taken != taken:
            await self._report()
        return batch

    async def _report(self, ended_at: int = 0) -> None:
        """Let sampling know how many batches were taken, and whether training has ended."""
        progress = {"taken": self._selector.taken, "ended_at": ended_at}
        await self._store.update(
            lambda state: (
                None if (state.taken, state.ended_at) == tuple(progress.values()) else state.model_copy(update=progress)
            )
        )

    def _check_other_processes(self, step: int, state: QueueState, end: float) -> None:
        if state.sampling_ended:
            raise TinsmithError(
                f"There is no batch for step {step}, and the process that samples has ended.",
                "Start it again with more steps, or take fewer steps here.",
            )
        if time.monotonic() > end:
            raise TinsmithError(
                f"No batch for step {step} within {counted(self._sync.timeout, 'second')}.",
                "Check that the run's process of mode explore is running; if it is, raise sync.timeout.",
            )

    async def _answer_requests(self, trained: int) -> None:
        """Training waits: publish newer weights if sampling waits for them, or let it continue without."""
        if not (await self._store.state()).wanted:
            return
        if self._sync.style == "on_demand" and trained > self._publisher.newest_step:
            await self._publisher.publish(trained)
        else:
            await self._store.update(QueueState.with_answers)


class EmptyQueue(BatchQueue):
    """Batches without groups, for a run that learns from demonstrations alone."""

    @override
    async def next(self, step: int) -> Batch:
        return Batch(step=step, groups=())

    @override
    async def publish(self, step: int) -> None:
        """Nothing samples by the weights."""
