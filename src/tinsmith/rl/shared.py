"""Training from a buffer that another process fills, which samples by the weights that this one publishes."""

from __future__ import annotations

import asyncio
import time

from tinsmith.errors import TinsmithError
from tinsmith.rl.buffers.base import Buffer
from tinsmith.rl.buffers.reader import Reader
from tinsmith.rl.meeting import LOOK_SECONDS, Notes, Published, Sampling, Training
from tinsmith.rl.policy import Policy
from tinsmith.rl.rollouts import Batch, Plan
from tinsmith.rl.supply import Supplied


class SharedSupply:
    """Implements `supply.Supply`."""

    def __init__(
        self, buffer: Buffer, reader: Reader, policy: Policy, plan: Plan, steps: int, ttl_seconds: int | None
    ) -> None:
        """`steps` of the run; `ttl_seconds` of the checkpoints that are published."""
        self._buffer, self._reader, self._policy = buffer, reader, policy
        self._notes, self._sync, self._keep = Notes(buffer), plan.sync, plan.sync.kept(plan.staleness)
        self._steps, self._ttl = steps, ttl_seconds
        self._weights: tuple[Published, ...] | None = None

    async def next(self, step: int) -> Batch:
        """Raises TinsmithError where the other process failed or has ended, or none comes within the timeout."""
        now, end = step - 1, time.monotonic() + self._sync.timeout
        if self._weights is None:
            self._weights = tuple(one for one in await self._notes.weights() if one.step < now)
            await self._publish(now)
        await self._notes.tell_training(Training(taken=self._reader.taken))
        while True:
            sampling = await self._notes.sampling()  # before the buffer: what was put before it ended is there
            failed = sampling.state == "failed"
            batch = None if failed and self._reader.reuses else await self._take(step, sampling)
            if batch is not None:
                return batch
            if failed:
                raise TinsmithError(f"The process that samples failed: {sampling.reason}", "Mend it, and start both.")
            if sampling.state == "ended":
                raise TinsmithError(
                    f"There is no batch for step {step}, and the process that samples has ended.",
                    "Start it again with more steps, or take fewer here.",
                )
            if time.monotonic() > end:
                raise TinsmithError(
                    f"No batch for step {step} within {self._sync.timeout:g} seconds.",
                    "Is the run's process of mode explore under way? If it is, set sync.timeout higher.",
                )
            await self._serve(now)
            await asyncio.sleep(LOOK_SECONDS)

    async def _take(self, step: int, sampling: Sampling) -> Batch | None:
        """The reader's next, if there is one; sampling is told what need not be waited for, be it left out."""
        last = self._sync.style == "fixed" and sampling.done >= step  # the next is sampled by weights of a later step
        before = self._reader.taken
        batch = await self._reader.take(self._policy.version, again=last)
        if self._reader.taken != before:
            await self._notes.tell_training(Training(taken=self._reader.taken))
        return batch

    async def trained(self, step: int) -> None:
        """Publishes what is due, whatever is saved at this step."""
        match self._sync.style:
            case "on_demand":
                due = await self._notes.wanted()
            case "fixed":
                due = step % self._sync.interval == 0
            case _:
                due = step % self._sync.period == 0
        if due:
            await self._publish(step)
        if step == self._steps:
            await self._notes.tell_training(Training(taken=self._reader.taken, ended_at=step))

    async def settle(self) -> Supplied:
        """Where it is in the buffer, which outlives the process."""
        return Supplied(reading=self._reader.state)

    async def saved(self) -> None:
        """Drops what was trained on for the last time."""
        await self._reader.clear()

    async def restore(self, state: Supplied) -> None:
        """What was sampled meanwhile is in the buffer."""
        self._reader.restore(state.reading)

    async def close(self) -> None:
        """Lets go of the buffer."""
        await self._buffer.close()

    async def _publish(self, step: int) -> None:
        """A named checkpoint; where there was no update since the last one, the same again."""
        known = self._weights or ()
        version = self._policy.version
        path = known[-1].path if known and known[-1].version == version else ""
        if not path:
            path = await self._policy.save_for_sampling(f"sync-{step:06}", self._ttl)
        kept = (*known, Published(step=step, version=version, path=path))[-self._keep :]
        self._weights = kept
        await self._notes.tell_weights(kept)
        for old in {one.path for one in known} - {one.path for one in kept}:
            await self._policy.forget(old)

    async def _serve(self, now: int) -> None:
        """Training waits: who looks for newer weights gets the newest, or goes on with those there are."""
        if not await self._notes.wanted():
            return
        if self._sync.style == "on_demand" and self._weights and now > self._weights[-1].step:
            await self._publish(now)
        else:
            await self._notes.none_newer()
