"""Training worker: one loop per engine that starts the requests that can run, each group in its own task.

The loop sleeps until there is work. Groups of different models run side by side. A failing request fails alone. When
the engine dies, running requests stay queued: models are restored from the journal when next needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

from tinsmith.errors import BadRequest, EngineDied, EngineError, Gone, TinsmithError
from tinsmith.service.budgets.models import MemoryUse, ModelUse
from tinsmith.service.budgets.queue import attended_first
from tinsmith.service.checkpoints import Checkpoints
from tinsmith.service.engines.host import MAX_DEATH_POINTS, MAX_ENGINE_DEATHS, EngineHost, death_points
from tinsmith.service.engines.occupancy import Stay
from tinsmith.service.engines.queue_view import QueueEntry, QueueView, Throughput
from tinsmith.service.observability.audit import AuditLog
from tinsmith.service.observability.metrics import Telemetry
from tinsmith.service.results.futures import Futures
from tinsmith.service.storage.payloads import queued_request
from tinsmith.service.storage.records import (
    ForkModel,
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
from tinsmith.service.storage.store import Store
from tinsmith.service.tenancy.quotas import QuotaEnforcer
from tinsmith.service.training.eviction import ModelBudget
from tinsmith.service.training.execution import Execution
from tinsmith.service.training.journal import Journal
from tinsmith.service.training.model_state import ModelState
from tinsmith.service.training.queue import RequestQueue
from tinsmith.service.training.running import RunningGroups
from tinsmith.service.training.scheduler import Group, next_groups

log = logging.getLogger(__name__)

FIRST_SEQ, LAST_SEQ = -1, 2**62
"""seq_ids of the worker's own requests: before, and after, all requests of clients."""
RETRY_S = 1.0
"""Time before requests run again whose results, and errors, could not be stored."""


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
        budget: ModelBudget,
    ) -> None:
        self.host = host
        self._store, self._futures, self._quota = store, futures, quotas
        self._batch_tokens = batch_tokens
        self._states: defaultdict[str, ModelState] = defaultdict(ModelState)
        self._queue = RequestQueue(host.names[0], store, futures, telemetry, self._states)
        throughput = Throughput()
        self._execution = Execution(
            host,
            store,
            checkpoints,
            journal,
            quotas,
            telemetry,
            audit_log,
            self._queue,
            self._states,
            throughput,
            budget,
        )
        self._activity = budget.activity
        self._running = RunningGroups(self._queue.wake)
        self._last_shadow_owner = ""
        """Owner of the last shadow pass."""
        self._draining = False
        self._is_replacing = False
        """Whether the worker itself has stopped the engine, so that no running request is to blame."""
        self._view = QueueView(lambda now: self._queue.entries(self._running.ids, now), throughput)

    # Requests.

    async def is_accepted(self, model: Model, seq: int) -> bool:
        """Whether the model's request `seq` was accepted before: a client that repeats a request must not train twice.

        Payloads are not compared: a repeated save carries a new sampling_session_seq_id. Raises BadRequest if a later
        request has started.
        """
        state = self._states[model.id]
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

        `is_new` stores the model as well, unless it is a shadow. A request that was accepted before changes nothing.
        Raises Busy or Forbidden if the tenant is over a quota, or if disk or memory have no room.
        """
        self._quota.check_payload(len(payload))
        request = self._request(request_id_of(model.id, seq), model, seq, operation)
        new_records = [model] if is_new and model.id not in self._store.shadows else []
        if new_records:
            self._execution.evictor.check_new(model.lora)
        if isinstance(operation, SaveState | SaveSampler | SaveExternal):
            self._quota.check_storage(model.owner)
        reserved_model = self._quota.reserve_model(model.owner) if new_records else nullcontext()
        with reserved_model, self._quota.reserve_request(model.owner, request.tokens):
            if await self._store.accept(request, payload, *new_records):
                state = self._states[model.id]
                state.accepted_seq = max(state.accepted_seq, seq)
                self._queue.promise(request)
        return request.id

    def recover(self, seqs: Mapping[str, tuple[int, int]], pending: Sequence[QueuedRequest]) -> None:
        """Take over what an earlier process accepted for this engine's models.

        `seqs` maps a model to the highest seq_ids that were accepted and finished; `pending` requests have no result.
        """
        for model_id, (accepted, finished) in seqs.items():
            if self._serves(model_id):
                state = self._states[model_id]
                state.accepted_seq, state.started_seq = accepted, finished
        for request in pending:
            if self._serves(request.model_id):
                self._queue.promise(request)

    def unload(self, model: Model) -> None:
        """End a model after all of its queued requests."""
        self._queue.add(self._request(f"{model.id}:drop", model, LAST_SEQ, UnloadModel()))

    async def ensure_loaded(self, model: Model) -> None:
        """Wait until the running engine has the model. Raises TinsmithError if the model cannot be restored."""
        state = self._states[model.id]
        if not state.load_finished.is_set():
            self._queue.add(self._request(f"{model.id}:revive", model, FIRST_SEQ, RestoreModel()))
            await state.load_finished.wait()
        if state.error is not None:
            raise state.error

    async def evict_idle(self) -> None:
        """Evict the models that nobody uses."""
        with suppress(EngineDied):
            await self._execution.evictor.evict_idle()

    def models(self) -> list[ModelUse]:
        """The models in training, in the engine or evicted, without shadows."""
        return self._execution.evictor.models()

    def memory_use(self) -> MemoryUse:
        """Memory of the models in training."""
        return self._execution.evictor.use()

    async def cancel_session(self, session_id: str) -> None:
        """Fail the queued requests of a session whose client is gone."""
        error = Gone(f"Session {session_id} has ended: its client was silent for too long.", "Create another session.")
        for request in list(self._queue.requests.values()):
            is_own = request.model_id.startswith(f"{session_id}:") and not isinstance(request.operation, UnloadModel)
            if is_own and request.id not in self._running.ids:
                await self._queue.fail(request, error)

    def is_broken(self, model_id: str) -> bool:
        """Whether the model could not be restored in the running engine."""
        state = self._states.get(model_id)
        return state is not None and state.error is not None

    def queue(self) -> list[QueueEntry]:
        """Clients' requests without a result, in the order in which they are expected to end."""
        return self._view.entries()

    def queue_entry(self, request_id: str) -> QueueEntry | None:
        """A request's entry of the queue; None if it is not there, or has only just come."""
        return self._view.find(request_id)

    # The loop.

    async def run(self) -> None:
        """Start groups forever. The caller starts the engine first; the worker restarts it when it dies."""
        watch = self._watch_engine()
        try:
            while True:
                if not self.host.is_up:
                    watch.cancel()
                    await self._running.finish()  # the death has failed their calls
                    await self._restart_engine()
                    watch = self._watch_engine()
                self._queue.wake.clear()
                for group in self._next_groups():
                    passes = self._running.of_model(group[0].model_id)
                    self._running.start(group, self._run(group, passes))
                await self._queue.wake.wait()
        except Exception:
            await self.host.stop()  # the next call must not repeat what the engine is doing
            raise
        finally:
            watch.cancel()
            await self._running.cancel()

    async def drain(self) -> None:
        """Start nothing more; wait until what runs is finished and its results are stored."""
        self._draining = True
        await self._running.finish()

    async def close(self) -> None:
        """Abandon background writes; a replay repeats them."""
        await self._execution.writer.close()

    def _watch_engine(self) -> asyncio.Task[None]:
        async def wake_on_death() -> None:
            await self.host.died.wait()
            self._queue.wake.set()

        return asyncio.create_task(wake_on_death())

    async def _restart_engine(self) -> None:
        await self.host.stop()
        for state in self._states.values():
            state.reset()
        self._is_replacing = False
        await self.host.restart()

    def _next_groups(self) -> Sequence[Group]:
        """The requests to start now. Requests that were running when an engine died run first, each by itself."""
        if not self._queue.must_isolate:
            self.host.allow_sampling()  # samples wait until then, so that the next death has one possible cause
        if self._draining:
            return ()
        running, passing = self._running.groups, self._passing()
        if self._queue.must_isolate:
            waiting = self._queue.of_idle_models(())
        else:
            waiting = self._queue.of_idle_models(self._running.models - passing, self._running.ids)
        requests = attended_first(waiting, self._activity.abandoned(), self._queue.models())
        groups = next_groups(requests, running, self._batch_tokens, self._last_shadow_owner, passing)
        for group in groups:
            if group[0].in_background:
                self._last_shadow_owner = group[0].owner
        return groups

    def _passing(self) -> set[str]:
        """The models whose passes the engine computes, and which run nothing else."""
        groups = Counter(group[0].model_id for group in self._running.groups)
        return {model_id for model_id, count in groups.items() if count == 1 and self._states[model_id].is_passing}

    async def _run(self, group: Group, passes: asyncio.Task[None] | None) -> None:
        """Run a group. `passes` runs passes of the same model, which the engine has."""
        try:
            async with self.host.occupancy.share() as stay:
                await self._attempt(group, stay, passes)
        except Exception:
            log.exception("Results of %s cannot be stored; the requests run again.", _ids(group))
            await self._replace_engine()  # its models are ahead of the database
            await asyncio.sleep(RETRY_S)

    async def _attempt(self, group: Group, stay: Stay, passes: asyncio.Task[None] | None) -> None:
        started: Sequence[QueuedRequest] = ()
        try:
            async with self._execution.holding(group):
                started = await self._execution.load_models(group)
                if started:
                    await self._execution.run(started, self._batch_tokens, passes)
        except EngineDied as death:
            await self.host.stop()
            if not self._is_replacing:
                await self._isolate(group, started, death_points(death) if stay.alone and len(started) == 1 else 0)
                log.warning("At the death of the engine it ran %s (%s).", _ids(group), death.message)
        except TinsmithError as error:
            await self._queue.fail_all(group, error)
        except Exception as error:  # a bug, or a failing disk: the requests fail, the loop goes on
            log.exception("Requests %s failed.", _ids(group))
            await self._replace_engine()  # it may have changed a model without a stored result
            await self._queue.fail_all(group, EngineError(f"Internal error: {type(error).__name__}."))

    async def _replace_engine(self) -> None:
        self._is_replacing = True
        await self.host.stop()

    async def _isolate(self, batch: Sequence[QueuedRequest], started: Sequence[QueuedRequest], points: int) -> None:
        """After an engine death, run each request of a group again by itself, to find the one that causes it.

        `started` are the requests that the engine was given; `points` count against one that was alone there.
        """
        for request in self._queue.unfinished(batch):
            self._queue.replace(replace(request, alone=True))
        for request in self._queue.unfinished(started):
            self._queue.deaths[request.id] += points
            if self._queue.deaths[request.id] >= MAX_DEATH_POINTS:
                error = f"The engine died {MAX_ENGINE_DEATHS} times while it ran this request by itself."
                await self._queue.fail(request, EngineError(error, "Send fewer tokens; the log has the reason."))

    # The queue.

    def _serves(self, model_id: str) -> bool:
        model = self._store.find(Model, model_id)
        return model is not None and model.base_model in self.host.names

    def _request(self, request_id: str, model: Model, seq: int, operation: Operation) -> QueuedRequest:
        """A request that is younger than all others."""
        request = queued_request(request_id, model.owner, model.id, seq, self._queue.next_order(), operation)
        if not (isinstance(operation, ForkModel) and operation.source):
            return replace(request, yields=model.id in self._store.shadows)
        return replace(request, source=operation.source, source_seq=self._states[operation.source].accepted_seq)


def _ids(requests: Sequence[QueuedRequest]) -> str:
    return ", ".join(request.id for request in requests)
