"""Training worker: one loop per engine that takes a batch, runs it and publishes the results.

The loop sleeps until there is work. A failing request fails alone. When the engine dies, the requests that were running
stay queued: the engine is restarted, each model is restored from the journal when it is next needed, and the loop
continues.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from tinsmith.engine.base import Pass
from tinsmith.errors import BadRequest, EngineDied, EngineError, TinsmithError
from tinsmith.service.checkpoints import Checkpoints
from tinsmith.service.engines.host import MAX_ENGINE_DEATHS, EngineHost
from tinsmith.service.observability.audit import AuditLog
from tinsmith.service.observability.metrics import Telemetry
from tinsmith.service.results.futures import Futures
from tinsmith.service.storage.payloads import kind_of, queued_request
from tinsmith.service.storage.records import (
    FutureResult,
    Model,
    Operation,
    QueuedRequest,
    RestoreModel,
    SaveExternal,
    SaveSampler,
    SaveState,
    UnloadModel,
    request_id_of,
)
from tinsmith.service.storage.store import FinishedRequest, Store, StoredRecord
from tinsmith.service.tenancy.quotas import QuotaEnforcer
from tinsmith.service.training.background_writes import BackgroundWriter
from tinsmith.service.training.journal import Journal
from tinsmith.service.training.model_state import ModelState
from tinsmith.service.training.operations import Operations, PostCommit, pass_result
from tinsmith.service.training.scheduler import next_batch

log = logging.getLogger(__name__)

FIRST_SEQ, LAST_SEQ = -1, 2**62
"""seq_ids of the worker's own requests: before, and after, all requests of clients."""


class Worker:
    """The training loop of one engine."""

    def __init__(
        self,
        host: EngineHost,
        store: Store,
        futures: Futures,
        journal: Journal,
        checkpoints: Checkpoints,
        quotas: QuotaEnforcer,
        batch_tokens: int,
        telemetry: Telemetry,
        audit_log: AuditLog,
    ) -> None:
        self.host = host
        self._store = store
        self._futures = futures
        self._journal = journal
        self._quota = quotas
        self._writer = BackgroundWriter(host, store, checkpoints)
        self._operations = Operations(store, checkpoints, journal, quotas, self._writer)
        self._post_commit = PostCommit(host, store, checkpoints, journal, self._writer, audit_log)
        self._batch_tokens = batch_tokens
        self._telemetry = telemetry
        self._queue: dict[str, QueuedRequest] = {}
        self._states: dict[str, ModelState] = {}
        self._deaths: Counter[str] = Counter()
        """Engine deaths by request id."""
        self._order = 0
        self._last_owner = ""
        """Owner of the first request of the last batch."""
        self._wake = asyncio.Event()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    # Requests.

    async def is_accepted(self, model: Model, seq: int) -> bool:
        """Whether the model's request `seq` was accepted before: a client that repeats a request must not train twice.

        Payloads are not compared: a repeated save carries a new sampling_session_seq_id. Raises BadRequest if a later
        request has started.
        """
        state = self._state(model.id)
        if seq > state.accepted_seq:
            return False
        request_id = request_id_of(model.id, seq)
        if self._futures.knows(request_id, model.owner) or await self._store.result(request_id, model.owner):
            return True
        if seq < state.started_seq:
            raise BadRequest(
                f"seq_id {seq} arrived after request {state.started_seq} had started.",
                "Send requests in the order of seq_id.",
            )
        return False

    async def accept(
        self, model: Model, seq: int, operation: Operation, payload: bytes, *, is_new: bool = False
    ) -> str:
        """Store a request, promise its result and queue it. Returns the request's id.

        `is_new` stores the model as well. A request that was accepted before changes nothing. Raises Busy or Forbidden
        if the tenant is over a quota.
        """
        request = self._request(request_id_of(model.id, seq), model, seq, operation)
        if isinstance(operation, SaveState | SaveSampler | SaveExternal):
            self._quota.check_storage(model.owner)
        reserved_model = self._quota.reserve_model(model.owner) if is_new else nullcontext()
        with reserved_model, self._quota.reserve_request(model.owner, request.tokens):
            if await self._store.accept(request, payload, *([model] if is_new else [])):
                state = self._state(model.id)
                state.accepted_seq = max(state.accepted_seq, seq)
                self._promise(request)
        return request.id

    def recover(self, seqs: Mapping[str, tuple[int, int]], pending: Sequence[QueuedRequest]) -> None:
        """Take over what an earlier process accepted for this engine's models.

        `seqs` maps a model to the highest seq_ids that were accepted and finished; `pending` requests have no result.
        """
        for model_id, (accepted, finished) in seqs.items():
            if self._serves(model_id):
                state = self._state(model_id)
                state.accepted_seq, state.started_seq = accepted, finished
        for request in pending:
            if self._serves(request.model_id):
                self._promise(request)

    def unload(self, model: Model) -> None:
        """End a model after all of its queued requests."""
        self._enqueue(self._request(f"{model.id}:drop", model, LAST_SEQ, UnloadModel()))

    async def ensure_loaded(self, model: Model) -> None:
        """Wait until the running engine has the model. Raises TinsmithError if the model cannot be restored."""
        state = self._state(model.id)
        if not state.load_finished.is_set():
            self._enqueue(self._request(f"{model.id}:revive", model, FIRST_SEQ, RestoreModel()))
            await state.load_finished.wait()
        if state.error is not None:
            raise state.error

    def is_broken(self, model_id: str) -> bool:
        """Whether the model could not be restored in the running engine."""
        state = self._states.get(model_id)
        return state is not None and state.error is not None

    # The loop.

    async def run(self) -> None:
        """Run batches forever. The caller starts the engine first; the worker restarts it when it dies."""
        watch = self._watch_engine()
        try:
            while True:
                if not self.host.is_up:
                    watch.cancel()
                    await self._restart_engine()
                    watch = self._watch_engine()
                self._wake.clear()
                batch = self._next_batch()
                if batch:
                    self._idle.clear()
                    await self._attempt(batch)
                else:
                    self._idle.set()
                    await self._wake.wait()
        finally:
            watch.cancel()

    async def drain(self) -> None:
        """Start no further batch; wait until the running one is finished and its results are stored."""
        self._draining = True
        self._wake.set()
        await self._idle.wait()

    async def close(self) -> None:
        """Abandon background writes; a replay repeats them."""
        await self._writer.close()

    def _watch_engine(self) -> asyncio.Task[None]:
        async def wake_on_death() -> None:
            await self.host.died.wait()
            self._wake.set()

        return asyncio.create_task(wake_on_death())

    async def _restart_engine(self) -> None:
        log.warning("The engine of %s died; restarting it.", self.host.config.source)
        await self.host.stop()
        for state in self._states.values():
            state.reset()
        await self.host.restart()

    def _next_batch(self) -> Sequence[QueuedRequest]:
        """The requests to run now. Requests that were running when an engine died run first, each by itself."""
        isolated = [request for request in self._queue.values() if request.alone]
        if not isolated:  # samples wait until then, so that the next death has exactly one possible cause
            self.host.allow_sampling()
        if self._draining:
            return ()
        batch = next_batch(isolated or self._queue.values(), self._batch_tokens, self._last_owner)
        if batch:
            self._last_owner = batch[0].owner
        return batch

    async def _attempt(self, batch: Sequence[QueuedRequest]) -> None:
        started: Sequence[QueuedRequest] = ()
        try:
            started = await self._load_models(batch)
            if started:
                await (self._run_passes(started) if started[0].packs else self._run_barrier(started[0]))
        except EngineDied:
            await self.host.stop()
            await self._isolate(batch, started)
        except TinsmithError as error:
            await self._fail_all(batch, error)
        except Exception as error:  # a bug, or a failing disk: the requests fail, the loop goes on
            log.exception("Requests %s failed.", ", ".join(request.id for request in batch))
            await self.host.stop()  # the engine may have changed a model without a stored result
            await self._fail_all(batch, EngineError(f"Internal error: {type(error).__name__}."))

    # Running a batch.

    async def _load_models(self, batch: Sequence[QueuedRequest]) -> list[QueuedRequest]:
        """Restore the models of a batch where needed. Returns the requests that can run; the others have failed."""
        ready = []
        for request in batch:
            model, state = self._store.find(Model, request.model_id), self._state(request.model_id)
            if isinstance(request.operation, UnloadModel):
                ready.append(request)
                continue
            state.started_seq = max(state.started_seq, request.seq)
            if model is None or model.state == "failed":
                await self._fail(request, BadRequest(f"Model {request.model_id} was not created.", "Create another."))
                continue
            if model.state == "live" and not state.load_finished.is_set():
                await self._restore(model, state)
            if state.error is not None:
                await self._fail(request, state.error)
                continue
            ready.append(request)
        return ready

    async def _restore(self, model: Model, state: ModelState) -> None:
        try:
            restored = await self._journal.restore(model, self.host.engine)
        except EngineDied:
            state.record_engine_death(model.id)
            raise
        except TinsmithError as error:
            log.exception("Model %s cannot be restored.", model.id)
            state.error = EngineError(f"Model {model.id} cannot be restored: {error}")
        else:
            state.updated_seq, state.uncaptured_steps = restored.updated_seq, restored.uncaptured_steps
            state.restore_deaths = 0
            for version in restored.unwritten_versions:
                self._writer.schedule(version)
        state.load_finished.set()

    async def _run_passes(self, batch: Sequence[QueuedRequest]) -> None:
        name = self.host.names[0]
        passes = [request.operation for request in batch if isinstance(request.operation, Pass)]
        self._telemetry.batch_started(name, [request.tokens for request in batch], self._batch_tokens)
        self._telemetry.requests_started(request.id for request in batch)
        results = await self.host.engine.run(passes)
        self._telemetry.requests_ran(request.id for request in batch)
        self._telemetry.record_mismatches(name, passes, results)
        batch_id = time.time_ns()
        await self._finish(
            [
                FinishedRequest(request=request, result=pass_result(result), batch=batch_id)
                for request, result in zip(batch, results, strict=True)
            ]
        )

    async def _run_barrier(self, request: QueuedRequest) -> None:
        model = self._store.find(Model, request.model_id)
        assert model is not None
        if isinstance(request.operation, RestoreModel):
            self._queue.pop(request.id, None)
            self._state(request.model_id).load_finished.set()
        elif isinstance(request.operation, UnloadModel):
            await self.host.engine.drop(model.id)
            await self._journal.forget(model)
            self._queue.pop(request.id, None)
            self._states.pop(request.model_id, ModelState()).load_finished.set()
        else:
            await self._run_operation(request, model)

    async def _run_operation(self, request: QueuedRequest, model: Model) -> None:
        self._telemetry.requests_started([request.id])
        try:
            done = await self._operations.perform(request, model, self.host.engine)
        except EngineDied:
            raise
        except TinsmithError as error:
            failed = replace(model, state="failed") if model.state == "pending" else model
            await self._fail(request, error, failed)
            return
        self._telemetry.requests_ran([request.id])
        await self._finish([FinishedRequest(request=request, result=done.result)], *done.records)
        await self._post_commit.run(request, done, self._state(request.model_id))

    async def _isolate(self, batch: Sequence[QueuedRequest], started: Sequence[QueuedRequest]) -> None:
        """After an engine death, run each request of the batch again by itself, to find the one that causes it.

        `started` are the requests that the engine was given; one that was running at too many deaths fails.
        """
        for request in self._unfinished(batch):
            self._queue[request.id] = replace(request, alone=True)
        for request in self._unfinished(started):
            self._deaths[request.id] += 1
            if self._deaths[request.id] >= MAX_ENGINE_DEATHS:
                error = f"The engine died {MAX_ENGINE_DEATHS} times while it ran this request."
                await self._fail(request, EngineError(error, "Send fewer tokens."))

    # Results.

    async def _finish(self, finished: Sequence[FinishedRequest], *records: StoredRecord) -> None:
        """Store results, then publish them.

        Raises ValueError if a result cannot be stored: the engine's state is then ahead of the database.
        """
        try:
            await self._store.finish(finished, *records)
        except TinsmithError as error:
            raise ValueError(f"A result cannot be stored: {error}") from error
        self._publish(finished)

    async def _fail_all(self, batch: Sequence[QueuedRequest], error: TinsmithError) -> None:
        for request in self._unfinished(batch):
            await self._fail(request, error)

    async def _fail(self, request: QueuedRequest, error: TinsmithError, *records: Model) -> None:
        if isinstance(request.operation, UnloadModel | RestoreModel):
            self._queue.pop(request.id, None)
            self._state(request.model_id).load_finished.set()
            return
        finished = [FinishedRequest(request=request, result=FutureResult.failure(error))]
        await self._store.finish(finished, *records)
        self._publish(finished)

    def _publish(self, finished: Sequence[FinishedRequest]) -> None:
        for end in finished:
            request, result = end.request, end.result
            self._queue.pop(request.id, None)
            self._deaths.pop(request.id, None)
            self._futures.resolve(request.id, result)
            succeeded = isinstance(request.operation, Pass) and not result.failed
            tokens = {kind_of(request.operation): request.tokens} if succeeded else None
            self._telemetry.request_finished(request.id, result, tokens)

    # The queue.

    def _state(self, model_id: str) -> ModelState:
        return self._states.setdefault(model_id, ModelState())

    def _serves(self, model_id: str) -> bool:
        model = self._store.find(Model, model_id)
        return model is not None and model.base_model in self.host.names

    def _unfinished(self, requests: Sequence[QueuedRequest]) -> list[QueuedRequest]:
        return [request for request in requests if request.id in self._queue]

    def _request(self, request_id: str, model: Model, seq: int, operation: Operation) -> QueuedRequest:
        """A request that is younger than all others."""
        self._order += 1
        return queued_request(request_id, model.owner, model.id, seq, self._order, operation)

    def _promise(self, request: QueuedRequest) -> None:
        self._futures.open(request.id, request.owner, stored=True)
        self._enqueue(request)

    def _enqueue(self, request: QueuedRequest) -> None:
        self._order = max(self._order, request.order)
        self._queue[request.id] = request
        if not isinstance(request.operation, UnloadModel | RestoreModel):
            self._telemetry.request_accepted(request.id, request.owner, kind_of(request.operation), self.host.names[0])
        self._wake.set()
