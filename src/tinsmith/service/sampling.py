"""Sampling requests: admission by tenant, sampling, and results, which are kept in memory only.

When the engine dies, the samples that were running answer 410 and the client submits them again under new numbers. A
sample that keeps killing engines is found by `CrashIsolation` and fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from tinsmith.engine.base import OnDelta, SampleRequest, SampleResult
from tinsmith.engine.interface import Engine
from tinsmith.errors import Busy, EngineDied, EngineError, Gone, TinsmithError
from tinsmith.service.checkpoints import Checkpoints
from tinsmith.service.concurrency import gather_or_cancel, run_in_thread_if_large
from tinsmith.service.engines.admission import AdmissionQueue, AdmissionTicket
from tinsmith.service.engines.host import MAX_DEATH_POINTS, MAX_ENGINE_DEATHS, OWN_DEATH, EngineHost, death_points
from tinsmith.service.engines.queue_view import QueueEntry, QueueView
from tinsmith.service.observability.metrics import Telemetry
from tinsmith.service.results.futures import Futures
from tinsmith.service.results.routed_experts import RecentRoutedExperts
from tinsmith.service.storage.records import JSON, PROTOBUF, Checkpoint, FutureResult, Model, SamplingSession, Session
from tinsmith.service.storage.store import Store
from tinsmith.service.tenancy.quotas import QuotaEnforcer
from tinsmith.service.training.worker import Worker
from tinsmith.service.wire.protobuf import encode_sampled
from tinsmith.service.wire.provenance import SequenceRegistry
from tinsmith.service.wire.sample_request import AsampleRequest, SparseLayout

log = logging.getLogger(__name__)

LOST = FutureResult(
    status=410, media=JSON, body=b'{"detail": "This sample was lost with its engine. Submit it again."}'
)

ALONE_POINTS = MAX_DEATH_POINTS - OWN_DEATH
"""Points of engine deaths from which a sample runs by itself."""
MAX_REMEMBERED = 10_000
"""Requests whose deaths are remembered; of more, the earliest are forgotten."""


@dataclass(slots=True, eq=False)
class UnfinishedSample:
    """An accepted sampling request without a result."""

    owner: str
    base_model: str
    request: SampleRequest
    sampler: SamplingSession | None
    """None for a completion, whose client waits on the connection."""
    task: asyncio.Task[Any] = field(init=False)
    since: float = field(default_factory=time.monotonic)
    parts: Sequence[SampleRequest] = ()
    """What the admission queue is given; empty before that."""
    has_sampled: bool = False
    """Whether only its result has to be encoded."""

    def entry(self, admission: AdmissionQueue, tickets: Mapping[str, AdmissionTicket], now: float) -> QueueEntry:
        """The row that shows it, with the cache tokens of what has not ended."""
        own = [tickets[part.request_id] for part in self.parts if part.request_id in tickets]
        tokens = sum(ticket.tokens for ticket in own) or admission.reserve(self.request)
        return QueueEntry(
            request_id=self.request.request_id,
            owner=self.owner,
            model_id=self.sampler.id if self.sampler is not None else self.request.version or self.base_model,
            kind="sample" if self.sampler is not None else "completion",
            tokens=0 if self.has_sampled else tokens,
            running=self.has_sampled or any(ticket.admitted for ticket in own),
            waited_s=now - self.since,
        )


@dataclass(slots=True)
class SampleAttempt:
    """One attempt at a sample."""

    engine_start: int | None = None
    """`EngineHost.start_count` of the engine that was given the sample; None before that."""
    alone: bool = False
    """Whether the sample must run by itself."""


class CrashIsolation:
    """Finds the sample that kills engines.

    Many samples run at once, and most are innocent: they are lost, and their clients submit them again. Deaths are
    counted in points by the content of a request, since a resubmitted sample has another id. A sample that was running
    at `MAX_ENGINE_DEATHS - 1` deaths runs by itself from then on; only a death while it does can fail it. A success
    clears it.
    """

    def __init__(self) -> None:
        self._deaths: dict[int, tuple[int, tuple[int, int]]] = {}
        """Hash of the request -> (points, the process at whose death the last ones were counted: the engine's start,
        and its number in a pool)."""

    @asynccontextmanager
    async def isolate(self, host: EngineHost, scope: str, request: SampleRequest) -> AsyncIterator[SampleAttempt]:
        """Guard one sample, which runs inside the block. Raises EngineError if the sample is refused."""
        content = hash(
            (
                request.cache_scope,
                scope,
                request.version,
                request.prompt.tobytes(),
                request.images,
                request.max_tokens,
                request.num_samples,
            )
        )
        alone = self._points(content) >= ALONE_POINTS
        async with host.isolation_lock if alone else nullcontext():
            self._refuse(content)
            attempt = SampleAttempt(alone=alone)
            try:
                yield attempt
            except EngineDied as death:
                # The next engine may be up already, so `host.start_count` may belong to that one.
                start = host.start_count if attempt.engine_start is None else attempt.engine_start
                process = (start, death.process)
                if content not in self._deaths or self._deaths[content][1] != process:  # a group: many equal requests
                    most = MAX_DEATH_POINTS if alone else ALONE_POINTS
                    points = min(self._points(content) + death_points(death), most)
                    self._deaths.pop(content, None)  # the latest is the last
                    self._deaths[content] = points, process
                    if len(self._deaths) > MAX_REMEMBERED:
                        del self._deaths[next(iter(self._deaths))]
                self._refuse(content)
                raise
        self._deaths.pop(content, None)

    def _points(self, content: int) -> int:
        return self._deaths[content][0] if content in self._deaths else 0

    def _refuse(self, content: int) -> None:
        if self._points(content) >= MAX_DEATH_POINTS:
            raise EngineError(
                f"The engine died {MAX_ENGINE_DEATHS} times while it sampled this.",
                "Send a shorter prompt, or request fewer tokens.",
            )


class Sampling:
    """The running sampling requests of all engines."""

    def __init__(
        self,
        store: Store,
        futures: Futures,
        checkpoints: Checkpoints,
        quotas: QuotaEnforcer,
        workers: Mapping[str, Worker],
        capacity: int,
        telemetry: Telemetry,
        sequences: SequenceRegistry,
    ) -> None:
        self._store = store
        self._futures = futures
        self._checkpoints = checkpoints
        self._quota = quotas
        self._workers = workers
        self._capacity = capacity
        self._telemetry = telemetry
        self._sequences = sequences
        self.routed_experts = RecentRoutedExperts(self._owner_of)
        self._running: dict[str, UnfinishedSample] = {}
        self._views = WeakKeyDictionary[EngineHost, QueueView]()
        self._clients: Counter[str] = Counter()
        """Clients that joined each sampling session."""
        self._crash_isolation = CrashIsolation()

    # Requests.

    def restore(self) -> None:
        """Announce the samples that an earlier process lost, except those of ended sessions."""

        def is_wanted(request_id: str) -> bool:
            sampler = self._store.find(SamplingSession, request_id.rpartition(":")[0])
            session = self._store.find(Session, sampler.session_id) if sampler is not None else None
            return session is not None and session.ended is None

        self._futures.restore_lost(is_wanted)

    def check_capacity(self) -> None:
        """Raise Busy if the maximum number of samples is waiting or running."""
        if len(self._running) >= self._capacity:
            raise Busy(f"{self._capacity} samples are waiting here.", "Submit it again in a moment.")

    def submit(self, sampler: SamplingSession, asample: AsampleRequest, request_id: str) -> None:
        """Start sampling for a future, unless the request was submitted before.

        Raises Busy if the tenant is over a quota.
        """
        if self._futures.knows(request_id, sampler.owner):
            return
        with self._quota.reserve_request(sampler.owner, len(asample.request.prompt)):
            self._futures.open(request_id, sampler.owner, stored=False, logged=True)
        self._telemetry.request_accepted(request_id, sampler.owner, "sample", sampler.base_model)
        asample = replace(asample, request=replace(asample.request, request_id=request_id))
        sample = UnfinishedSample(sampler.owner, sampler.base_model, asample.request, sampler)
        self._running[request_id] = sample
        sample.task = asyncio.create_task(self._run(sample, asample.layout))
        sample.task.add_done_callback(lambda _: self._running.pop(request_id, None))

    def start(
        self, owner: str, base_model: str, request: SampleRequest, on_delta: OnDelta | None = None
    ) -> asyncio.Task[SampleResult]:
        """Start sampling for a caller that awaits the task itself. Cancelling the task cancels the engine's work.

        Raises Busy if the tenant is over a quota.
        """
        reservation = ExitStack()
        reservation.enter_context(self._quota.reserve_request(owner, len(request.prompt)))
        sample = UnfinishedSample(owner, base_model, request, None)
        self._running[request.request_id] = sample
        sample.task = task = asyncio.create_task(self._sample(sample, on_delta))
        self._telemetry.request_accepted(request.request_id, owner, "completion", base_model)
        task.add_done_callback(lambda done: self._record_end(request, done))
        task.add_done_callback(lambda _: reservation.close())
        return task

    async def cancel(self, request_id: str) -> bool:
        """Cancel a sample here and in the engine; its future fails. False if it is not running."""
        sample = self._running.get(request_id)
        if sample is None:
            return False
        text = f"Request {request_id} was cancelled."
        result = FutureResult.failure(Gone(text))
        self._futures.resolve(request_id, result)
        self._telemetry.request_finished(request_id, result)
        sample.task.cancel(text)
        return True

    async def cancel_session(self, session_id: str) -> None:
        """Cancel the running samples of a session's sampling sessions."""
        for request_id in [running for running in self._running if running.startswith(f"{session_id}:sample:")]:
            await self.cancel(request_id)

    async def join(self, sampler: SamplingSession) -> int:
        """Number one more client of a sampling session: 1, 2, …; no number repeats, also after a restart."""
        latest = self._store.find(SamplingSession, sampler.id) or sampler
        self._clients[sampler.id] = number = max(self._clients[sampler.id], latest.joined) + 1
        await self._store.update(SamplingSession, sampler.id, joined=number)
        if self._clients[sampler.id] == number:
            del self._clients[sampler.id]
        return number

    def current_version(self, sampler: SamplingSession) -> str | None:
        """The version to sample from now: fixed, or the model's latest inflight version. None is the base model."""
        if sampler.inflight_of is None:
            return sampler.version
        model = self._store.find(Model, sampler.inflight_of)
        return model.inflight if model is not None else None

    def _owner_of(self, sampler_id: str) -> str | None:
        """Tenant of a sampling session, whose record may be deleted before its session's."""
        session = self._store.find(Session, sampler_id.partition(":")[0])
        return session.owner if session is not None else None

    async def drain(self) -> None:
        """Wait until nothing runs."""
        if self._running:
            await asyncio.wait([sample.task for sample in self._running.values()])

    async def close(self) -> None:
        """Abandon the running samples."""
        for sample in list(self._running.values()):
            sample.task.cancel()

    # The queue.

    def queue(self, host: EngineHost) -> list[QueueEntry]:
        """The samples of an engine without a result, in the order in which they are expected to end."""
        return self._view(host).entries()

    def queue_entry(self, host: EngineHost, request_id: str) -> QueueEntry | None:
        """A sample's entry of the queue a moment ago; None if it was not there."""
        return self._view(host).find(request_id)

    def _view(self, host: EngineHost) -> QueueView:
        if host not in self._views:
            names, admission = host.names, host.admission_queue  # the view must not keep the host
            self._views[host] = QueueView(lambda now: self._entries(names, admission, now), admission.throughput)
        return self._views[host]

    def _entries(self, names: Collection[str], admission: AdmissionQueue, now: float) -> Iterator[QueueEntry]:
        tickets = admission.tickets()
        for sample in self._running.values():
            if sample.base_model in names:
                yield sample.entry(admission, tickets, now)

    # Running one request.

    async def _run(self, sample: UnfinishedSample, layout: SparseLayout | None) -> None:
        """Sample, encode and resolve the future."""
        request = sample.request
        tokens: dict[str, int] = {}
        try:
            sampled = await self._sample(sample)
            self._telemetry.requests_ran([request.request_id])
            tokens = _token_counts(request, sampled)
            body = await run_in_thread_if_large(_result_bytes(request, sampled), encode_sampled, sampled, layout)
            result = FutureResult(body=body, media=PROTOBUF)
            lengths = [len(sequence.tokens) for sequence in sampled.sequences]
            self._sequences.record(request.request_id, sampled.prompt_tokens or len(request.prompt), lengths)
            self.routed_experts.add(request.request_id, sampled)
        except EngineDied:
            result = LOST
        except TinsmithError as error:
            result = FutureResult.failure(error)
        except Exception as error:  # a bug fails this request alone
            log.exception("Sampling request %s failed.", request.request_id)
            result = FutureResult.failure(EngineError(f"Internal error: {type(error).__name__}."))
        self._running.pop(request.request_id, None)  # the client may submit its next sample at once
        self._futures.resolve(request.request_id, result)
        self._telemetry.request_finished(request.request_id, result, tokens)

    async def _sample(self, sample: UnfinishedSample, on_delta: OnDelta | None = None) -> SampleResult:
        """Sample the parts of a request once the admission queue lets each in."""
        worker, sampler = self._workers[sample.base_model], sample.sampler
        request = replace(sample.request, cache_scope=sample.owner)
        isolation = self._crash_isolation.isolate(worker.host, sampler.id if sampler else sample.base_model, request)
        in_use = self._checkpoints.use.sampling(request.version if sampler is None else sampler.version)
        async with in_use, isolation as attempt:
            sample.parts = worker.host.admission_queue.parts(request)
            sampled = _joined(
                await gather_or_cancel(
                    self._sample_part(worker, part, on_delta, sampler, attempt) for part in sample.parts
                )
            )
            sample.has_sampled = True
        self._quota.charge(sample.owner, sum(len(sequence.tokens) for sequence in sampled.sequences))
        return sampled

    async def _sample_part(
        self,
        worker: Worker,
        request: SampleRequest,
        on_delta: OnDelta | None,
        sampler: SamplingSession | None,
        attempt: SampleAttempt,
    ) -> SampleResult:
        async with worker.host.admission_queue.admit(request.cache_scope, request):
            try:
                return await self._sample_on_engine(worker, request, on_delta, sampler, attempt)
            except asyncio.CancelledError:
                with suppress(TinsmithError):
                    await worker.host.engine.cancel(request.request_id)
                raise

    async def _sample_on_engine(
        self,
        worker: Worker,
        request: SampleRequest,
        on_delta: OnDelta | None,
        sampler: SamplingSession | None,
        attempt: SampleAttempt,
    ) -> SampleResult:
        """Sample from the request's version. If the engine detached or replaced the version meanwhile, retry once."""
        may_retry = True
        while True:
            if sampler is not None:
                request = replace(request, version=self.current_version(sampler))
            await self._engine_with(worker, request.version)
            occupancy = worker.host.occupancy
            try:
                async with occupancy.reserve() if attempt.alone else occupancy.share():
                    engine = worker.host.engine
                    attempt.engine_start = worker.host.start_count
                    self._telemetry.requests_started([request.request_id])
                    return await engine.sample(request, on_delta)
            except Gone:
                if request.version is None or not may_retry:
                    raise
            may_retry = False
            worker.host.attached.discard(request.version)  # its folder may still exist

    async def _engine_with(self, worker: Worker, version: str | None) -> Engine:
        """The running engine, once the version is attached to it."""
        host = worker.host
        engine = await host.wait_until_ready()
        if version is None or version in host.attached:
            return engine
        checkpoint = self._store.find(Checkpoint, version)
        if checkpoint is None:
            raise Gone(
                "The weights of this sampling session were deleted, or replaced by newer ones and not used for long.",
                "Save the weights again, under a name if they are to stay (docs/serve/operate.md#unnamed-versions).",
            )
        if checkpoint.ready:
            await host.attach(version, await self._checkpoints.source(checkpoint))
        else:
            model = self._store.find(Model, checkpoint.run)
            if model is None or model.state != "live":
                raise Gone("The weights of this sampling session were lost.", "Create another.")
            await worker.ensure_loaded(model)
        return await host.wait_until_ready()

    def _record_end(self, request: SampleRequest, done: asyncio.Task[SampleResult]) -> None:
        self._running.pop(request.request_id, None)
        if done.cancelled():
            result, tokens = FutureResult.failure(Gone("The client is gone.")), None
        elif (error := done.exception()) is not None:
            result, tokens = FutureResult.failure(EngineError(str(error))), None
        else:
            self._telemetry.requests_ran([request.request_id])
            result, tokens = FutureResult.of({}), _token_counts(request, done.result())
        self._telemetry.request_finished(request.request_id, result, tokens)


def _joined(parts: Sequence[SampleResult]) -> SampleResult:
    """The result of a request: the samples of all parts, and what the first part says of the prompt."""
    return replace(parts[0], sequences=tuple(sequence for part in parts for sequence in part.sequences))


def _token_counts(request: SampleRequest, sampled: SampleResult) -> dict[str, int]:
    """Tokens of the prompt, prompt tokens from the prefix cache, and sampled tokens."""
    return {
        "prompt": sampled.prompt_tokens or len(request.prompt),
        "prompt_cached": sampled.prompt_cache_hit_tokens,
        "sample": sum(len(sequence.tokens) for sequence in sampled.sequences),
    }


def _result_bytes(request: SampleRequest, sampled: SampleResult) -> int:
    """Approximate size of the encoded result."""
    prompt = len(request.prompt) * (1 + request.topk_prompt_logprobs + request.prompt_alt_tokens_k)
    sequences = sum(len(sequence.tokens) for sequence in sampled.sequences) * (1 + request.topk_sample_logprobs)
    targets = 0 if sampled.target_prompt_logprobs is None else sampled.target_prompt_logprobs.size
    return 8 * (prompt + sequences + targets)
