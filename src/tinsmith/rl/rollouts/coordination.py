"""What a process that samples and one that trains tell each other through a buffer's notes.

    weights    by training: steps and sampler paths that may be sampled from, oldest first
    training   by training: how many batches it has taken, and whether it has ended
    sampling   by sampling: whether it goes on, has made all its batches, or failed and why
    wanted     by sampling: the step of the weights it has, where it looks for newer ones; training takes it away

Either may be killed and started again; what it left is read by the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from pydantic import Field, TypeAdapter

from tinsmith.errors import TinsmithError
from tinsmith.rl.policy.base import SamplingClients
from tinsmith.rl.rollouts.buffers.base import Buffer
from tinsmith.rl.rollouts.weight_sync import PublishedWeights
from tinsmith.settings import Settings

POLL_SECONDS = 0.2
"""How often each looks what the other has left."""


class WeightRecord(Settings):
    """Weights that may be sampled from."""

    step: int
    version: int
    path: str


class TrainerStatus(Settings):
    """Where training is."""

    taken: int = 0
    """Batches it has looked at."""
    ended_at: int = 0
    """Steps after which it was finished; 0 while it is not."""


class SamplerStatus(Settings):
    """Where sampling is."""

    state: Literal["under way", "ended", "failed"] = "under way"
    reason: str = ""
    """Of a failure."""
    done: int = 0
    """The last batch that was put."""
    cursor: int = 0
    """Training tasks drawn for that one and all before."""
    order: dict[str, Any] = Field(default_factory=dict)
    """What their order has learned."""


_WEIGHTS = TypeAdapter(tuple[WeightRecord, ...])


class CoordinationNotes:
    """A buffer's notes, typed."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    async def weights(self) -> tuple[WeightRecord, ...]:
        """Oldest first."""
        text = (await self._buffer.notes()).get("weights")
        return _WEIGHTS.validate_json(text) if text else ()

    async def training(self) -> TrainerStatus:
        """As it was last told."""
        text = (await self._buffer.notes()).get("training")
        return TrainerStatus.model_validate_json(text) if text else TrainerStatus()

    async def sampling(self) -> SamplerStatus:
        """As it was last told."""
        text = (await self._buffer.notes()).get("sampling")
        return SamplerStatus.model_validate_json(text) if text else SamplerStatus()

    async def wanted(self) -> bool:
        """Whether sampling looks for newer weights."""
        return bool((await self._buffer.notes()).get("wanted"))

    async def tell_weights(self, weights: tuple[WeightRecord, ...]) -> None:
        """In place of what was told before; whoever looked for newer ones has them."""
        await self._buffer.note("weights", _WEIGHTS.dump_json(weights).decode())
        await self._buffer.note("wanted", "")

    async def tell_training(self, training: TrainerStatus) -> None:
        """In place of what was told before."""
        await self._buffer.note("training", training.model_dump_json())

    async def tell_sampling(self, sampling: SamplerStatus) -> None:
        """In place of what was told before."""
        await self._buffer.note("sampling", sampling.model_dump_json())

    async def want(self, step: int) -> None:
        """Newer weights than those of `step`."""
        await self._buffer.note("wanted", str(step))

    async def none_newer(self) -> None:
        """Whoever looks for newer ones goes on with what there is."""
        await self._buffer.note("wanted", "")


class TrainingEnded(Exception):
    """No further batch is wanted."""

    def __init__(self, step: int) -> None:
        """`step` was the last one."""
        super().__init__(step)
        self.step = step


class SharedWeights:
    """Of a policy that trains in another process; implements `sync.Weights`."""

    def __init__(self, notes: CoordinationNotes, peers: SamplingClients, timeout: float) -> None:
        """`timeout` in seconds."""
        self._notes, self._peers, self._timeout = notes, peers, timeout
        self._newest: PublishedWeights | None = None
        self._path = ""

    async def at(self, step: int) -> PublishedWeights:
        """Raises TinsmithError after the timeout."""

        async def look() -> PublishedWeights | None:
            found = [one for one in await self._notes.weights() if one.step >= step]
            return await self._open(found[0]) if found else None

        return await self._until(look, f"No weights of step {step}")

    async def newer(self, than: int) -> PublishedWeights:
        """Raises TinsmithError after the timeout."""
        newest = await self.look()
        if newest is not None and newest.step > than:
            return newest
        await self._notes.want(than)

        async def look() -> PublishedWeights | None:
            return None if await self._notes.wanted() else await self.look()

        return await self._until(look, f"No weights newer than those of step {than}")

    def newest(self) -> PublishedWeights:
        """What `look` saw last."""
        assert self._newest is not None
        return self._newest

    async def look(self) -> PublishedWeights | None:
        """The newest that are told of; None as long as there are none."""
        weights = await self._notes.weights()
        return await self._open(weights[-1]) if weights else None

    async def _open(self, one: WeightRecord) -> PublishedWeights:
        if self._newest is None or (self._newest.step, self._path) != (one.step, one.path):
            self._newest = PublishedWeights(one.step, await self._peers.open_checkpoint(one.path, one.version))
            self._path = one.path
        return self._newest

    async def _until(self, look: Callable[[], Awaitable[PublishedWeights | None]], what: str) -> PublishedWeights:
        end = time.monotonic() + self._timeout
        while (found := await look()) is None:
            if time.monotonic() > end:
                raise TinsmithError(
                    f"{what} within {self._timeout:g} seconds.",
                    "Is the run's process of mode train under way? If it is, set sync.timeout higher.",
                )
            await asyncio.sleep(POLL_SECONDS)
        return found
