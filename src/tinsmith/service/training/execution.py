"""Execution of scheduled requests: models are restored, passes and barriers run on the engine, results are stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace

from tinsmith.engine.base import Pass
from tinsmith.errors import BadRequest, EngineDied, TinsmithError
from tinsmith.service.checkpoints import Checkpoints
from tinsmith.service.engines.host import EngineHost
from tinsmith.service.engines.queue_view import Throughput
from tinsmith.service.observability.audit import AuditLog
from tinsmith.service.observability.metrics import Telemetry
from tinsmith.service.storage.records import Model, QueuedRequest, RestoreModel, UnloadModel
from tinsmith.service.storage.store import FinishedRequest, Store
from tinsmith.service.tenancy.quotas import QuotaEnforcer
from tinsmith.service.training.background_writes import BackgroundWriter
from tinsmith.service.training.eviction import ModelBudget, ModelEvictor
from tinsmith.service.training.journal import Journal
from tinsmith.service.training.model_state import ModelRestorer, ModelState
from tinsmith.service.training.operations import Operations, PostCommit, pass_result
from tinsmith.service.training.queue import RequestQueue


class Execution:
    """Runs the requests of one engine."""

    def __init__(
        self,
        host: EngineHost,
        store: Store,
        checkpoints: Checkpoints,
        journal: Journal,
        quotas: QuotaEnforcer,
        telemetry: Telemetry,
        audit_log: AuditLog,
        queue: RequestQueue,
        states: MutableMapping[str, ModelState],
        throughput: Throughput,
        budget: ModelBudget,
    ) -> None:
        self._host, self._store, self._journal, self._telemetry = host, store, journal, telemetry
        self._queue, self._states, self._throughput = queue, states, throughput
        self.writer = BackgroundWriter(host, store, checkpoints)
        self.evictor = ModelEvictor(host, store, journal, self.writer, budget, states, queue)
        self._restorer = ModelRestorer(store, journal, self.writer)
        self._operations = Operations(store, checkpoints, journal, quotas, self.writer)
        self._post_commit = PostCommit(host, store, checkpoints, journal, self.writer, audit_log)

    def holding(self, batch: Sequence[QueuedRequest]) -> AbstractAsyncContextManager[None]:
        """Keep the models of a batch in the engine for the duration of the block, once there is room for them."""
        models = {request.model_id for request in batch} | {request.source for request in batch if request.source}
        restores = not isinstance(batch[0].operation, UnloadModel)
        return self.evictor.holding(models, restores=restores)

    async def load_models(self, batch: Sequence[QueuedRequest]) -> list[QueuedRequest]:
        """Restore the models of a batch where needed. Returns the requests that can run; the others have failed."""
        ready = []
        for request in batch:
            model, state = self._store.find(Model, request.model_id), self._states[request.model_id]
            if isinstance(request.operation, UnloadModel):
                ready.append(request)
                continue
            state.started_seq = max(state.started_seq, request.seq)
            if model is None or model.state == "failed":
                error = BadRequest(f"Model {request.model_id} was not created.", "Create another.")
                await self._queue.fail(request, error)
                continue
            await self._restorer.restore(model, state, self._host.engine)
            if request.source:
                source = self._store.find(Model, request.source)
                await self._restorer.restore(source, self._states[request.source], self._host.engine)
            if state.error is not None:
                await self._queue.fail(request, state.error)
                continue
            ready.append(request)
        return ready

    async def run(
        self, batch: Sequence[QueuedRequest], batch_tokens: int, passes: asyncio.Task[None] | None = None
    ) -> None:
        """Run a batch whose models are loaded: passes, or one barrier.

        `passes` is the task of passes of the barrier's model that the engine has. The result of an optim_step is stored
        with theirs, in one transaction.
        """
        if isinstance(batch[0].operation, Pass):
            await self._run_passes(batch, batch_tokens)
        else:
            await self._run_barrier(batch[0], passes)

    async def _run_passes(self, batch: Sequence[QueuedRequest], batch_tokens: int) -> None:
        name = self._host.names[0]
        passes = [
            replace(await self._operations.with_start(request.operation), share=request.owner)
            for request in batch
            if isinstance(request.operation, Pass)
        ]
        self._telemetry.batch_started(name, [request.tokens for request in batch], batch_tokens)
        self._telemetry.requests_started(request.id for request in batch)
        self._throughput.start(time.monotonic())
        computed = 0
        try:
            with self._passing(batch):
                results = await self._host.engine.run(passes)
            computed = sum(request.tokens for request in batch)
        finally:
            self._throughput.end(computed, time.monotonic())
        self._telemetry.requests_ran(request.id for request in batch)
        self._telemetry.record_mismatches(name, passes, results)
        batch_id = time.time_ns()
        finished = [
            FinishedRequest(request=request, result=pass_result(result), batch=batch_id)
            for request, result in zip(batch, results, strict=True)
        ]
        next_step = self._states[batch[0].model_id].next_step
        if next_step is not None and (step := await next_step) is not None:
            finished.append(step)  # in one transaction, which saves a sync of the disk
        await self._queue.finish(finished)

    @contextmanager
    def _passing(self, batch: Sequence[QueuedRequest]) -> Iterator[None]:
        """Note that the engine computes passes of a model during the block: the next step may be given to it."""
        model_id = batch[0].model_id
        state = self._states[model_id]
        state.is_passing, state.next_step = all(request.packs for request in batch), None
        if self._queue.count(model_id) > len(batch):
            self._queue.wake.set()  # the next may be a step
        try:
            yield
        finally:
            state.is_passing = False

    async def _run_barrier(self, request: QueuedRequest, passes: asyncio.Task[None] | None) -> None:
        model = self._store.find(Model, request.model_id)
        assert model is not None
        if isinstance(request.operation, RestoreModel):
            self._queue.remove(request)
            self._states[request.model_id].load_finished.set()
        elif isinstance(request.operation, UnloadModel):
            await self._host.engine.drop(model.id)
            if self._store.shadows.pop(model.id, None) is None:
                await self._journal.forget(model)
            self._queue.remove(request)
            self._states.pop(request.model_id, ModelState()).load_finished.set()
        else:
            await self._run_operation(request, model, passes)

    async def _run_operation(self, request: QueuedRequest, model: Model, passes: asyncio.Task[None] | None) -> None:
        self._telemetry.requests_started([request.id])
        state = self._states[request.model_id]
        try:
            with state.performing() as result:
                done = await self._operations.perform(request, model, self._host.engine)
                finished = FinishedRequest(request=request, result=done.result)
                result.set_result(finished)
        except EngineDied:
            raise
        except TinsmithError as error:
            failed = replace(model, state="failed") if model.state == "pending" else model
            await self._queue.fail(request, error, failed)
            return
        self._telemetry.requests_ran([request.id])
        if passes is not None:
            await self._stored(passes)
        if self._queue.unfinished([request]):  # else they have stored this result too
            await self._queue.finish([finished], *done.records)
        await self._post_commit.run(request, done, state)

    async def _stored(self, passes: asyncio.Task[None]) -> None:
        """Wait until passes have their results. Raises EngineDied if these could not be stored: what the engine did
        after them counts for nothing then."""
        await asyncio.wait([passes])
        if not self._host.is_up:
            raise EngineDied("The engine ended before the results of earlier passes were stored.", from_outside=True)
