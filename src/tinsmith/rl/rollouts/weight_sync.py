"""Which weights sample which batch, and how they come to who samples.

Batches and steps are counted from 1; step t trains on batch t. "The weights of step n" are those after n steps; n = 0
is the beginning. With interval i and offset o (the run's `staleness`), style `fixed` samples batch k by the weights of
step floor((k - 1 - o) / i) i, or 0 where that is negative: the same in every run. The other styles take the newest
weights there are, at times that they choose; what was taken is recorded with every group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import numpy as np
from pydantic import Field

from tinsmith.errors import TinsmithError
from tinsmith.rl.policy.base import ChatCodec, Policy, Prompt, SamplingConfig, Snapshot
from tinsmith.rl.types import Turn
from tinsmith.settings import Needs, Settings


class SyncConfig(Settings):
    """Which weights sample which batch."""

    style: Literal["fixed", "on_publish", "on_demand", "live"] = "fixed"
    """`fixed`: each batch by the weights of a step known beforehand. `on_publish`: every `interval` batches the newest
    published weights, waiting for newer ones than before. `on_demand`: every `interval` batches training is asked for
    its newest weights. Neither waits while training itself waits. `live`: newer weights are taken at once, also by
    rollouts under way."""
    interval: int = Field(default=1, ge=1)
    """Batches that are sampled by the same weights; in `live`, as `publish_every`."""
    publish_every: int | None = Field(default=None, ge=1)
    """Steps after which training publishes weights, in `on_publish` and `live`; not set: `interval`."""
    method: Literal["memory", "checkpoint"] | None = None
    """How weights are published: as a version without a name, or as a named sampler checkpoint that other processes can
    open. Not set: memory in one process, checkpoint in two."""
    keep: Annotated[int, Needs("method", unless=("memory",))] = Field(default=3, ge=1)
    """Checkpoints so published that are kept; older ones are deleted."""
    timeout: float = Field(default=3600.0, gt=0)
    """Seconds to wait for newer weights, or for a batch of another process, before the run ends with an error."""
    in_flight: Annotated[int, Needs("style", ("live",))] = Field(default=2, ge=1)
    """In `live`: batches under way at a time."""

    @property
    def period(self) -> int:
        """Steps between publications."""
        return self.publish_every or self.interval

    def weights_for(self, batch: int, offset: int) -> int:
        """The step whose weights sample `batch` in style fixed."""
        return max(0, (batch - 1 - offset) // self.interval * self.interval)

    def kept(self, offset: int) -> int:
        """Checkpoints to keep: in style fixed, all that a batch not yet sampled may want."""
        return max(self.keep, 2 - (-offset // self.interval)) if self.style == "fixed" else self.keep

    def turns(self, batch: int, offset: int) -> bool:
        """Whether newer weights are looked for before `batch`, in on_publish and on_demand."""
        return batch - 1 > offset and (batch - 1 - offset) % self.interval == 0


class ChangeNotifier:
    """Wakes whoever waits for something to have become true."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.rings = 0

    def ring(self) -> None:
        """Something has changed."""
        self.rings += 1
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Returns when `holds` does."""
        while not holds():
            await self._event.wait()

    async def rung_since(self, rings: int, seconds: float) -> None:
        """Returns when it rang since it had rung so often, or after so many seconds."""
        if self.rings == rings:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), seconds)


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """Weights to sample from, and the step that they are of."""

    step: int
    snapshot: Snapshot


class WeightSource(Protocol):
    """The weights of a run as its sampling side sees them."""

    async def at(self, step: int) -> PublishedWeights:
        """Those of `step`, or of a later one where a run has gone on from there; waits for them."""
        ...

    async def newer(self, than: int) -> PublishedWeights:
        """The newest. Waits for some newer than those of step `than`, but not while training waits itself."""
        ...

    def newest(self) -> PublishedWeights:
        """The newest that are here now."""
        ...


class LocalWeights:
    """Of a policy that trains in this process."""

    def __init__(self, changes: ChangeNotifier, timeout: float) -> None:
        """`timeout` in seconds."""
        self._bell, self._timeout = changes, timeout
        self._newest: PublishedWeights | None = None
        self._awaited: int | None = None
        self.wanted: int | None = None
        """Sampling looks for weights newer than those of this step."""

    @property
    def waiting(self) -> bool:
        """Whether nothing more can be begun by the weights that are here."""
        return self._awaited is not None and self._step < self._awaited

    def offer(self, step: int, snapshot: Snapshot) -> None:
        """They may be used from now on; whoever looks for newer ones has them."""
        self.wanted = None
        self._newest = PublishedWeights(step, snapshot)
        self._bell.ring()

    def none_newer(self) -> None:
        """Whoever looks for newer ones goes on with what there is."""
        self.wanted = None
        self._bell.ring()

    async def at(self, step: int) -> PublishedWeights:
        """Raises TinsmithError after the timeout."""
        self._awaited = step
        self._bell.ring()
        try:
            await self._until(lambda: self._step >= step, step)
        finally:
            self._awaited = None
        return self.newest()

    async def newer(self, than: int) -> PublishedWeights:
        """Raises TinsmithError after the timeout."""
        if self._step <= than:
            self.wanted = than
            self._bell.ring()
            await self._until(lambda: self.wanted is None, than + 1)
        return self.newest()

    def newest(self) -> PublishedWeights:
        """Something was offered."""
        assert self._newest is not None
        return self._newest

    @property
    def _step(self) -> int:
        return -1 if self._newest is None else self._newest.step

    async def _until(self, holds: Callable[[], bool], step: int) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await self._bell.until(holds)
        except TimeoutError as error:
            raise TinsmithError(
                f"No weights of step {step} within {self._timeout:g} seconds.",
                "Set sync.timeout higher than a step takes.",
            ) from error


class LiveSnapshot:
    """A snapshot that speaks by the newest weights at each request."""

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights

    @property
    def version(self) -> int:
        """Of the moment."""
        return self._weights.newest().snapshot.version

    @property
    def chat(self) -> ChatCodec:
        """The same in all of them."""
        return self._weights.newest().snapshot.chat

    async def sample(self, prompt: Prompt, *, count: int, seed: int, sampling: SamplingConfig) -> tuple[Turn, ...]:
        """Each turn knows which version spoke."""
        return await self._weights.newest().snapshot.sample(prompt, count=count, seed=seed, sampling=sampling)

    async def open_model(self, name: str) -> Snapshot:
        """As of the policy."""
        return await self._weights.newest().snapshot.open_model(name)

    async def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Of the moment."""
        return await self._weights.newest().snapshot.logprobs(tokens)


class WeightPublisher:
    """Makes the weights of a policy available to sample from."""

    def __init__(self, policy: Policy, method: Literal["memory", "checkpoint"], keep: int, ttl: int | None) -> None:
        """`keep` and `ttl` (seconds) are of checkpoints."""
        self._policy, self._method, self._keep, self._ttl = policy, method, keep, ttl
        self._paths: list[str] = []
        self._last: tuple[int, str, Snapshot] | None = None

    async def publish(self, step: int) -> tuple[str, Snapshot]:
        """(path, snapshot) of the weights of now, which are those of `step`; the path is empty with `memory`."""
        version = self._policy.version
        if self._last is None or self._last[0] != version:
            self._last = (version, *await self._publish(step, version))
        return self._last[1:]

    async def _publish(self, step: int, version: int) -> tuple[str, Snapshot]:
        if self._method == "memory":
            return "", await self._policy.snapshot()
        path = await self._policy.save_for_sampling(f"sync-{step:06}", self._ttl)
        self._paths.append(path)
        while len(self._paths) > self._keep:
            await self._policy.delete_checkpoint(self._paths.pop(0))
        return path, await self._policy.open_checkpoint(path, version)
