"""Sampling requests: into the engine as fast as it takes them, in turns by tenant, never behind training.

Their results live in memory alone.
When the engine dies, samples in flight answer 410, and the client submits them again under a new number. One that goes
on killing engines fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import replace

from tinsmith.engine.base import Engine, OnDelta, SampleRequest, SampleResult
from tinsmith.errors import Busy, EngineDied, EngineError, Gone, TinsmithError
from tinsmith.service.checkpoints import Checkpoints
from tinsmith.service.concurrency import run_in_thread_if_large
from tinsmith.service.engines.host import MAX_ENGINE_DEATHS, EngineHost
from tinsmith.service.observability.metrics import Telemetry
from tinsmith.service.results.futures import Futures
from tinsmith.service.storage.records import JSON, PROTOBUF, Checkpoint, FutureResult, Model, SamplingSession, Session
from tinsmith.service.storage.store import Store
from tinsmith.service.tenancy.quotas import QuotaEnforcer
from tinsmith.service.training.worker import Worker
from tinsmith.service.wire.protobuf import encode_sampled
from tinsmith.service.wire.provenance import Claim, SequenceRegistry
from tinsmith.service.wire.sample_request import AsampleRequest


class CrashIsolation:
    """Counts deaths by what was asked, since a sample that is sent again has another id. One that succeeds is clear."""

    def __init__(self) -> None:
        self._deaths: dict[int, tuple[int, int]] = {}
        """What was asked -> how many engines died, and which start was the last of these."""

    @asynccontextmanager
    async def isolate(self, host: EngineHost, session: str, request: SampleRequest) -> AsyncIterator[None]:
        """The sample is under way inside. Raises EngineError for one that is refused."""
        asked = hash(
            (
                request.cache_scope,
                session,
                request.version,
                request.prompt.tobytes(),
                request.max_tokens,
                request.num_samples,
            )
        )
        async with host.isolation_lock if self._count(asked) == MAX_ENGINE_DEATHS - 1 else nullcontext():
            self._refuse(asked)
            try:
                yield
            except EngineDied:
                if self._deaths.get(asked, (0, 0))[1] != host.start_count:  # a group asks the same many times
                    self._deaths[asked] = self._count(asked) + 1, host.start_count
                self._refuse(asked)
                raise
        self._deaths.pop(asked, None)

    def _count(self, asked: int) -> int:
        return self._deaths.get(asked, (0, 0))[0]

    def _refuse(self, asked: int) -> None:
        if self._count(asked) >= MAX_ENGINE_DEATHS:
            what = f"The engine died {MAX_ENGINE_DEATHS} times while it sampled this."
            raise EngineError(what, "Send a shorter prompt, or ask for fewer tokens.")


log = logging.getLogger(__name__)

LOST = FutureResult(
    status=410, media=JSON, body=b'{"detail": "This sample was lost with its engine. Submit it again."}'
)


class Sampling:
    """Requests in flight over all engines."""

    def __init__(
        self,
        store: Store,
        futures: Futures,
        checkpoints: Checkpoints,
        quotas: QuotaEnforcer,
        workers: Mapping[str, Worker],
        limit: int,
        telemetry: Telemetry,
    ) -> None:
        self._store = store
        self._futures = futures
        self._checkpoints = checkpoints
        self._quota = quotas
        self._workers = workers
        self._limit = limit
        self._telemetry = telemetry
        self._running: dict[str, asyncio.Task[None] | asyncio.Task[SampleResult]] = {}
        self._clones: Counter[str] = Counter()
        self._sequences = SequenceRegistry()
        self._crash_isolation = CrashIsolation()

    def restore(self) -> None:
        """What an earlier process left behind; of sessions that have ended nobody asks any more."""

        def wanted(request_id: str) -> bool:
            sampler = self._store.find(SamplingSession, request_id.rpartition(":")[0])
            session = self._store.find(Session, sampler.session_id) if sampler is not None else None
            return session is not None and session.ended is None

        self._futures.restore_lost(wanted)

    def check_capacity(self) -> None:
        """Raises Busy while there are too many."""
        if len(self._running) >= self._limit:
            raise Busy(f"{self._limit} samples are waiting here.", "Submit it again in a moment.")

    def submit(self, sampler: SamplingSession, ask: AsampleRequest, request_id: str) -> None:
        """Begin, unless the same request was submitted before. Raises Busy if its tenant is over a quota."""
        if self._futures.knows(request_id, sampler.owner):
            return
        with self._quota.reserve_request(sampler.owner, len(ask.request.prompt)):
            self._futures.open(request_id, sampler.owner, stored=False)
        self._telemetry.request_accepted(request_id, sampler.owner, "sample", sampler.base_model)
        task = asyncio.create_task(
            self._run(sampler, replace(ask, request=replace(ask.request, request_id=request_id)))
        )
        self._running[request_id] = task
        task.add_done_callback(lambda _: self._running.pop(request_id, None))

    def start(
        self, owner: str, base_model: str, request: SampleRequest, on_delta: OnDelta | None = None
    ) -> asyncio.Task[SampleResult]:
        """For who waits by itself: no promise is kept. Cancelling the task stops the engine's work.

        Raises Busy if the tenant is over a quota.
        """
        queued = ExitStack()
        queued.enter_context(self._quota.reserve_request(owner, len(request.prompt)))
        task = asyncio.create_task(self._sample(owner, base_model, request, on_delta))
        self._running[request.request_id] = task
        self._telemetry.request_accepted(request.request_id, owner, "completion", base_model)
        task.add_done_callback(lambda done: self._over(request, done))
        task.add_done_callback(lambda _: queued.close())
        return task

    def _over(self, request: SampleRequest, done: asyncio.Task[SampleResult]) -> None:
        self._running.pop(request.request_id, None)
        if done.cancelled():
            self._telemetry.request_finished(
                request.request_id, FutureResult.failure(Gone("Nobody waits for it any more."))
            )
        elif (error := done.exception()) is not None:
            self._telemetry.request_finished(request.request_id, FutureResult.failure(EngineError(str(error))))
        else:
            self._telemetry.requests_ran([request.request_id])
            self._telemetry.request_finished(request.request_id, FutureResult.of({}), _tokens(request, done.result()))

    async def cancel(self, request_id: str) -> None:
        """Stop the work, in the engine too; the future fails."""
        task = self._running.get(request_id)
        if task is not None:
            answer = FutureResult.failure(Gone(f"Request {request_id} was cancelled."))
            self._futures.resolve(request_id, answer)
            self._telemetry.request_finished(request_id, answer)
            task.cancel()

    async def cancel_session(self, session_id: str) -> None:
        """Of a session that has ended nobody wants what its sampling sessions still do."""
        for request_id in [one for one in self._running if one.startswith(f"{session_id}:sample:")]:
            await self.cancel(request_id)

    async def join(self, sampler: SamplingSession) -> int:
        """A number for one more client of a sampling session: 1, 2, …, never the same twice, also after a restart."""
        known = self._store.find(SamplingSession, sampler.id) or sampler
        self._clones[sampler.id] = number = max(self._clones[sampler.id], known.joined) + 1
        await self._store.update(SamplingSession, sampler.id, joined=number)
        return number

    async def drain(self) -> None:
        """Wait until nothing runs."""
        if self._running:
            await asyncio.wait(self._running.values())

    def check(self, claims: Iterable[Claim], owner: str) -> None:
        """Raises BadRequest for provenance that cannot be."""

        def is_owned(sampler_id: str) -> bool:
            sampler = self._store.find(SamplingSession, sampler_id)
            return sampler is not None and sampler.owner == owner

        self._sequences.check(claims, is_owned)

    async def close(self) -> None:
        """Abandon what runs."""
        for task in list(self._running.values()):
            task.cancel()

    async def _run(self, sampler: SamplingSession, ask: AsampleRequest) -> None:
        request = ask.request
        tokens: dict[str, int] = {}
        try:
            sampled = await self._sample(sampler.owner, sampler.base_model, request, sampler=sampler)
            self._telemetry.requests_ran([request.request_id])
            tokens = _tokens(request, sampled)
            body = await run_in_thread_if_large(_weight(request, sampled), encode_sampled, sampled, ask.layout)
            answer = FutureResult(body=body, media=PROTOBUF)
            lengths = [len(sequence.tokens) for sequence in sampled.sequences]
            self._sequences.record(request.request_id, len(request.prompt), lengths)
        except EngineDied:
            answer = LOST
        except TinsmithError as error:
            answer = FutureResult.failure(error)
        except Exception as error:  # a fault of ours fails this request alone
            log.exception("Sampling request %s failed.", request.request_id)
            answer = FutureResult.failure(EngineError(f"Internal error: {type(error).__name__}."))
        self._futures.resolve(request.request_id, answer)
        self._telemetry.request_finished(request.request_id, answer, tokens)

    async def _sample(
        self,
        owner: str,
        base_model: str,
        request: SampleRequest,
        on_delta: OnDelta | None = None,
        sampler: SamplingSession | None = None,
    ) -> SampleResult:
        """When its tenant's turn comes."""
        worker = self._workers[base_model]
        request = replace(request, cache_scope=owner)
        trial = self._crash_isolation.isolate(worker.host, sampler.id if sampler is not None else base_model, request)
        async with trial, worker.host.admission_queue.admit(owner, request):
            try:
                sampled = await self._sample_known(worker, request, on_delta, sampler)
            except asyncio.CancelledError:
                with suppress(TinsmithError):
                    await worker.host.engine.cancel(request.request_id)
                raise
        self._quota.charge(owner, sum(len(one.tokens) for one in sampled.sequences))
        return sampled

    async def _sample_known(
        self, worker: Worker, request: SampleRequest, on_delta: OnDelta | None, sampler: SamplingSession | None
    ) -> SampleResult:
        """A version may leave the engine, or be replaced by a newer one, just before it is used: then once more."""
        once_more = True
        while True:
            if sampler is not None:
                request = replace(request, version=self.current_version(sampler))
            engine = await self._engine_with(worker, request.version)
            self._telemetry.requests_started([request.request_id])
            try:
                return await engine.sample(request, on_delta)
            except Gone:
                if request.version is None or not once_more:
                    raise
            once_more = False
            worker.host.attached.discard(request.version)  # its folder may still be here

    def current_version(self, sampler: SamplingSession) -> str | None:
        """What it samples from now: its own for ever, or what its model's inflight clients share."""
        if sampler.inflight_of is None:
            return sampler.version
        model = self._store.find(Model, sampler.inflight_of)
        return model.inflight if model is not None else None

    async def _engine_with(self, worker: Worker, version: str | None) -> Engine:
        """The living engine, once it knows the version."""
        host = worker.host
        engine = await host.wait_until_ready()
        if version is None or version in host.attached:
            return engine
        checkpoint = self._store.find(Checkpoint, version)
        if checkpoint is None:
            raise Gone("The weights of this sampling session were deleted.", "Create another.")
        if checkpoint.ready:
            await host.attach(version, self._checkpoints.folder(version))
        else:
            model = self._store.find(Model, checkpoint.run)
            if model is None or model.state != "live":
                raise Gone("The weights of this sampling session were lost.", "Create another.")
            await worker.ensure_loaded(model)
        return await host.wait_until_ready()


def _tokens(request: SampleRequest, sampled: SampleResult) -> dict[str, int]:
    """What is counted: tokens of the prompt, those of them that the cache held, tokens sampled."""
    return {
        "prompt": len(request.prompt),
        "prompt_cached": sampled.prompt_cache_hit_tokens,
        "sample": sum(len(sequence.tokens) for sequence in sampled.sequences),
    }


def _weight(request: SampleRequest, sampled: SampleResult) -> int:
    """About the bytes of the answer."""
    prompt = len(request.prompt) * (1 + request.topk_prompt_logprobs + request.prompt_alt_tokens_k)
    sequences = sum(len(one.tokens) for one in sampled.sequences) * (1 + request.topk_sample_logprobs)
    targets = 0 if sampled.target_prompt_logprobs is None else sampled.target_prompt_logprobs.size
    return 8 * (prompt + sequences + targets)
