"""Sampler replicas that act as one Sampler: requests go to the process whose prefix cache holds most of their prompt.

Every replica holds the base model and reads adapter versions from folders that never change, when it first samples from
them. The trainer captures and writes versions; samples of a version wait until it is written. When a replica ends, its
requests go to another one with the same seed, except those of which the caller has received tokens; these fail with
EngineDied. Training is not affected.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tinsmith.engine.adapters.transfer import FolderTransfer
from tinsmith.engine.adapters.versions import Version, VersionTable
from tinsmith.engine.base import ModelCard, OnDelta, SampleRequest, SampleResult, SavedAdapter, SequenceDelta
from tinsmith.engine.cluster.prefixes import PrefixTable, choose_replica, prompt_blocks
from tinsmith.engine.cluster.replica import MAX_FAILED_STARTS, Launch, SamplerProcess, SamplerReplica
from tinsmith.engine.interface import Sampler
from tinsmith.engine.sampling.capacity import cache_reserve
from tinsmith.engine.vllm import client
from tinsmith.errors import EngineDied, EngineError, Gone, TinsmithError

log = logging.getLogger(__name__)

WARM_REPLICAS = 2
"""Replicas that are given a version as soon as it is published."""
MAX_MOVES = 1
"""How often a request goes to another replica after a death that it may have caused."""


@dataclass(eq=False, slots=True)
class PooledVersion(Version):
    """An adapter version: waits until it is saved, then can be sampled from, until it is withdrawn."""

    name: str = ""
    """Its name on the replicas, never used again: caches of prefixes go by it."""
    saved: SavedAdapter | None = None
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is saved, or never will be."""
    on_trainer: str = ""
    """Its name on the trainer, if the trainer has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """State of a replica, for /metrics and `tinsmith status`."""

    index: int
    up: bool
    pid: int
    starts: int
    requests: int
    """Running ones."""
    cache_tokens: int
    """Reserved by running requests."""
    versions: int


@dataclass(slots=True)
class RoutingCounts:
    """Requests given to a replica, those that followed their prefix, and those moved after a death."""

    routed: int = 0
    routed_by_prefix: int = 0
    moved: int = 0


class SamplerPool:
    """Implements `engine.interface.Sampler`; create it with `start`."""

    def __init__(
        self, launches: Sequence[Launch], card: ModelCard | None, transfer: FolderTransfer, trainer: Sampler | None
    ) -> None:
        self.up = asyncio.Event()
        """Set while at least one replica runs."""
        self._may_choose = asyncio.Event()
        """Set while a request need not wait for a replica: one runs, or none starts."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a replica starts or ends."""
        self.counts = RoutingCounts()
        numbers = itertools.count(1)
        self._trainer, self._card, self._transfer = trainer, card, transfer
        self._replicas = [SamplerReplica(index, launch, numbers, self._change) for index, launch in enumerate(launches)]
        self._table = PrefixTable()
        self._versions = VersionTable[PooledVersion]()
        self._running: dict[str, asyncio.Task[SampleResult]] = {}
        self._warming: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @classmethod
    async def start(
        cls,
        launches: Sequence[Launch],
        card: ModelCard | None = None,
        transfer: FolderTransfer | None = None,
        *,
        trainer: Sampler | None = None,
    ) -> SamplerPool:
        """Start all replicas at once. Raises the error of one that does not start, after ending the others.

        `card` is given for vLLM replicas; what vLLM does not support is then sampled by the trainer's engine.
        `trainer`: None until `use_trainer`.
        """
        pool = cls(launches, card, transfer or FolderTransfer(), trainer)
        results = await asyncio.gather(*(each.start() for each in pool._replicas), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await pool.close()
            raise errors[0]
        return pool

    @property
    def living(self) -> int:
        """Replicas that run now."""
        return sum(replica.process is not None for replica in self._replicas)

    def status(self) -> list[ReplicaStatus]:
        """State of each replica."""
        return [_status(replica) for replica in self._replicas]

    @property
    def trainer(self) -> Sampler:
        """The engine that captures and writes versions. Raises EngineDied before there is one."""
        if self._trainer is None:
            raise EngineDied("The training processes are not running.", "Try again later.", from_outside=True)
        return self._trainer

    def use_trainer(self, trainer: Sampler) -> None:
        """Take versions from a new trainer. Those that the old one has not written are lost with it."""
        self._trainer = trainer
        for version, record in self._versions.items():
            record.on_trainer = ""
            if record.saved is None:
                self._versions.remove(version)
                record.decided.set()

    async def capture(self, model_id: str, version: str) -> None:
        await self.trainer.capture(model_id, version)
        await self._withdraw(version)
        self._add(version).on_trainer = version

    async def persist(self, version: str, to: Path) -> int:
        record = self._versions.find(version)
        size = await self.trainer.persist(version, to)
        if record is not None:
            self._transfer.when_readable(to, lambda saved: self._publish(version, record, saved))
        return size

    async def attach(self, version: str, source: SavedAdapter) -> None:
        record = self._versions.find(version)
        if record is not None and record.saved is not None and not self._transfer.can_read(record.saved):
            record.saved = source  # the same files as an object: replicas that have the version keep it
        if record is not None and record.saved == source:
            return
        await self._withdraw(version)
        self._add(version, source)

    async def detach(self, version: str) -> None:
        await self._withdraw(version)
        if self._trainer is not None:
            await self._trainer.detach(version)

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        task = asyncio.create_task(self._sample(request, on_delta))
        self._running[request.request_id] = task
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            if self._running.get(request.request_id) is task:
                del self._running[request.request_id]
        if task.cancelled():
            if self._is_closed:
                raise EngineDied("The samplers were closed.", "Submit it again.", from_outside=True)
            raise Gone(f"Request {request.request_id} was cancelled.", "Submit it again.")
        return task.result()

    async def cancel(self, request_id: str) -> None:
        if (task := self._running.get(request_id)) is not None:
            task.cancel()

    async def release_memory(self) -> None:
        """Let all replicas give back the memory that they keep for speed only."""
        processes = self._processes().values()
        results = await asyncio.gather(
            *(process.engine.release_memory() for process in processes), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EngineDied):
                raise result

    async def close(self) -> None:
        """End all replicas; running requests fail with EngineDied."""
        self._is_closed = True
        for task in [*self._running.values(), *self._warming]:
            task.cancel()
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    # Versions.

    def _add(self, version: str, saved: SavedAdapter | None = None) -> PooledVersion:
        record = self._versions.put(version, PooledVersion(saved=saved))
        record.name = f"{version}@{record.number}"
        if saved is not None:
            record.decided.set()
        return record

    def _publish(self, version: str, record: PooledVersion, saved: SavedAdapter) -> None:
        """Let the samples of a version begin, unless it was replaced, and give it to the least loaded replicas."""
        if self._versions.find(version) is not record:
            return
        record.saved = saved
        record.decided.set()
        for process in sorted(self._processes().values(), key=lambda process: process.load)[:WARM_REPLICAS]:
            task = asyncio.create_task(_warm(process, record.name, saved))
            self._warming.add(task)
            task.add_done_callback(self._warming.discard)

    async def _withdraw(self, version: str) -> None:
        """Delete a version here and on the replicas that have it; requests that wait for it fail."""
        record = self._versions.remove(version)
        if record is None:
            return
        record.decided.set()
        record.saved = None
        await asyncio.gather(*(process.detach(record.name) for process in self._processes().values()))
        if record.on_trainer == record.name:
            with suppress(EngineDied):
                await self.trainer.detach(record.name)

    async def _published(self, version: str) -> tuple[PooledVersion, SavedAdapter]:
        """A version and where it is saved, once it is.

        Raises Gone for an unknown version, and for one whose folder not all replicas see: it is to be attached again.
        """
        record = self._versions.find(version)
        if record is not None:
            await record.decided.wait()
        if record is None or record.saved is None or not self._transfer.can_read(record.saved):
            raise Gone(f"The samplers have no version '{version}'.", "Save the weights again.")
        return record, record.saved

    # Requests.

    async def _sample(self, request: SampleRequest, on_delta: OnDelta | None) -> SampleResult:
        """Sample on a replica, or on the trainer's engine what vLLM does not support."""
        if self._card is None:
            return await self._sample_on_replicas(request, on_delta)
        if not client.is_supported(request, self._card):
            return await self._sample_on_trainer(request, on_delta)
        if not client.has_prompt_questions(request):
            return await self._sample_on_replicas(request, on_delta)
        questions = asyncio.create_task(self._sample_on_trainer(client.prompt_questions(request), None))
        try:
            sampled, about_prompt = await self._sample_on_replicas(request, on_delta), await questions
        finally:
            questions.cancel()
        cached_tokens = sampled.prompt_cache_hit_tokens
        return replace(about_prompt, sequences=sampled.sequences, prompt_cache_hit_tokens=cached_tokens)

    async def _sample_on_trainer(self, request: SampleRequest, on_delta: OnDelta | None) -> SampleResult:
        if request.version is not None:
            record = self._versions.find(request.version)
            if record is None or not record.on_trainer:
                record, saved = await self._published(request.version)
                await self.trainer.attach(record.name, saved)
                record.on_trainer = record.name
            request = replace(request, version=record.on_trainer)
        try:
            return await self.trainer.sample(request, on_delta)
        except asyncio.CancelledError:
            with suppress(TinsmithError):
                await self.trainer.cancel(request.request_id)
            raise

    async def _sample_on_replicas(self, request: SampleRequest, on_delta: OnDelta | None) -> SampleResult:
        """Sample on one replica after another, until it succeeds or tokens of a replica that ended were passed on."""
        sent = _Sent(on_delta)
        moves = 0
        while True:
            saved = None
            routed = request
            if request.version is not None:
                record, saved = await self._published(request.version)
                routed = replace(request, version=record.name)
            process = await self._choose(routed)
            if saved is not None and not self._transfer.can_read(saved):
                continue  # a replica has started meanwhile on a machine that does not see the folder
            try:
                return await process.sample(routed, saved, sent.on_delta)
            except EngineDied as death:
                death.process = process.number
                moves += not death.from_outside
                if sent.any or moves > MAX_MOVES or self._is_closed or not process.engine.died.is_set():
                    raise
            self._forget(process)
            self.counts.moved += 1

    async def _choose(self, request: SampleRequest) -> SamplerProcess:
        """The replica for a request, once one runs. Raises EngineError if none starts."""
        if self._failure:
            for replica in self._replicas:
                replica.retry()
        while not (processes := self._processes()):
            if self._failure:
                raise EngineError(
                    f"No sampler has started for {MAX_FAILED_STARTS} times in a row: {self._failure}",
                    "Fix the cause; if another program takes the memory of the GPU, end it. The samplers are started "
                    "again with the next sample.",
                )
            await self._may_choose.wait()
        loads = {number: float(process.load) for number, process in processes.items()}
        length, answer = len(request.prompt), cache_reserve(request) / request.num_samples
        blocks = prompt_blocks(request.prompt, (request.version, request.cache_scope))
        holders = frozenset(number for number, process in processes.items() if request.version in process.attached)
        choice = choose_replica(self._table, blocks, length, loads, answer, holders)
        self.counts.routed += 1
        self.counts.routed_by_prefix += choice.by_prefix
        self._table.record(blocks, choice.replica)
        return processes[choice.replica]

    def _processes(self) -> dict[int, SamplerProcess]:
        return {each.process.number: each.process for each in self._replicas if each.process is not None}

    def _forget(self, process: SamplerProcess) -> None:
        """Give no more requests to a process that has ended, also before its watch notices."""
        for replica in self._replicas:
            if replica.process is process:
                replica.process = None
                self._change()

    @property
    def _failure(self) -> str:
        """Why no replica starts; empty while one runs or may start."""
        return self._replicas[0].failure if all(replica.failure for replica in self._replicas) else ""

    def _change(self) -> None:
        for event, is_set in ((self.up, self.living), (self._may_choose, self.living or self._failure)):
            if is_set:
                event.set()
            else:
                event.clear()
        self.on_change()


class _Sent:
    """Passes deltas on, and knows whether there were any."""

    def __init__(self, on_delta: OnDelta | None) -> None:
        self.any = False
        self.on_delta = None if on_delta is None else self._pass_on
        self._on_delta = on_delta

    def _pass_on(self, delta: SequenceDelta) -> None:
        self.any = True
        assert self._on_delta is not None
        self._on_delta(delta)


async def _warm(process: SamplerProcess, version: str, saved: SavedAdapter) -> None:
    """Give a version to a replica before it is used; a failure shows when it is."""
    with suppress(TinsmithError):
        await process.attach(version, saved)


def _status(replica: SamplerReplica) -> ReplicaStatus:
    process = replica.process
    return ReplicaStatus(
        index=replica.index,
        up=process is not None,
        pid=process.engine.pid if process else 0,
        starts=replica.starts,
        requests=process.requests if process else 0,
        cache_tokens=process.load if process else 0,
        versions=len(process.attached) if process else 0,
    )
