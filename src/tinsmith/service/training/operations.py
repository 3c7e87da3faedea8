"""Operations: what each training request except forward_backward does to the engine and the records.

`Operations` runs a request and describes its outcome; a request that fails has changed nothing. `PostCommit` does what
follows once the outcome is stored: versions are written, replaced checkpoints deleted, states captured. Nothing in it
can undo the request; what fails is logged, and the next step or the next start makes up for it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from tinsmith.atomic import remove_unfinished
from tinsmith.engine.base import Pass, PassResult, SavedAdapter
from tinsmith.engine.interface import Engine
from tinsmith.engine.training.shadow_plan import CHECKPOINT
from tinsmith.errors import BadRequest, EngineDied, EngineError, NotFound, TinsmithError
from tinsmith.service.budgets.models import BYTES_PER_PARAMETER
from tinsmith.service.checkpoints import Checkpoints, expiry
from tinsmith.service.encryption import encrypt
from tinsmith.service.engines.host import EngineHost
from tinsmith.service.observability.audit import AuditLog
from tinsmith.service.storage.records import (
    PROTOBUF,
    Checkpoint,
    CreateModel,
    ForkModel,
    FutureResult,
    LoadWeights,
    Model,
    OptimStep,
    QueuedRequest,
    SamplingSession,
    SaveExternal,
    SaveSampler,
    SaveState,
)
from tinsmith.service.storage.store import Store, StoredRecord
from tinsmith.service.tenancy.quotas import QuotaEnforcer
from tinsmith.service.training.background_writes import BackgroundWriter
from tinsmith.service.training.journal import Journal
from tinsmith.service.training.model_state import ModelState
from tinsmith.service.wire.protobuf import encode_pass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationResult:
    """The outcome of a successful request."""

    result: FutureResult
    records: tuple[StoredRecord, ...] = ()
    """Records that the request created or changed."""
    replaced: Checkpoint | None = None
    """A checkpoint that was overwritten, or an inflight version that has a successor."""
    unwritten: Checkpoint | None = None
    """A version that is to be written in the background."""


class Operations:
    """Runs requests on an engine."""

    def __init__(
        self,
        store: Store,
        checkpoints: Checkpoints,
        journal: Journal,
        quotas: QuotaEnforcer,
        writer: BackgroundWriter,
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._journal = journal
        self._quota = quotas
        self._writer = writer

    async def with_start(self, operation: Pass) -> Pass:
        """A pass with the folder of the checkpoint that it starts from, if it names one. Raises NotFound."""
        checkpoint_id = operation.loss_config.get(CHECKPOINT)
        if checkpoint_id is None:
            return operation
        checkpoint = self._store.find(Checkpoint, str(checkpoint_id))
        if checkpoint is None:
            raise NotFound(f"Checkpoint {operation.loss_config.get('shadow/at')} was deleted.", "Name another.")
        return replace(operation, start=await self._checkpoints.source(checkpoint))

    async def perform(self, request: QueuedRequest, model: Model, engine: Engine) -> OperationResult:
        """Run a barrier request. Raises TinsmithError if it fails."""
        try:
            return await self._perform(request, model, engine)
        except OSError as error:
            log.exception("Request %s failed.", request.id)
            raise EngineError(
                f"The server's data folder failed: {error.strerror or 'files could not be copied'}.",
                "The server's log has details for its operator.",
            ) from error

    async def _perform(self, request: QueuedRequest, model: Model, engine: Engine) -> OperationResult:
        operation = request.operation
        if isinstance(operation, CreateModel):
            await engine.create(model.id, model.lora)
            result = FutureResult.of({"model_id": model.id, "type": "create_model"})
            return OperationResult(result=result, records=(replace(model, state="live"),))
        if isinstance(operation, OptimStep):
            metrics = await engine.step(model.id, operation.adam)
            return OperationResult(result=FutureResult.of({"metrics": metrics}))
        if isinstance(operation, LoadWeights):
            return await self._load(request, operation, model, engine)
        if isinstance(operation, ForkModel):
            return await self._fork(operation, model, engine)
        self._quota.check_storage(request.owner)  # again: earlier saves have been written since it was accepted
        if isinstance(operation, SaveState):
            return await self._save_state(request, operation, model, engine)
        if isinstance(operation, SaveSampler):
            return await self._save_sampler(request, operation, model, engine)
        if isinstance(operation, SaveExternal):
            return await self._save_external(request, operation, model, engine)
        raise TypeError(f"{type(operation).__name__} is not a barrier")

    async def _load(
        self, request: QueuedRequest, operation: LoadWeights, model: Model, engine: Engine
    ) -> OperationResult:
        """Load a checkpoint.

        Its files are linked as the model's captured state before the engine has them, since the checkpoint's owner may
        delete the checkpoint meanwhile.
        """
        checkpoint = self._store.find(Checkpoint, operation.checkpoint)
        if checkpoint is None:
            raise NotFound(f"Checkpoint {operation.path} was deleted before it could be loaded.", "Load another.")
        await self._writer.flush(model)  # a replay starts at the load, so it cannot make earlier versions again
        captured = await self._journal.link(model, self._checkpoints, checkpoint, request.seq)
        model = replace(captured, state="live", captured_optimizer=operation.optimizer)
        try:
            await engine.load(model.id, await self._journal.source(model), optimizer=operation.optimizer)
        except (TinsmithError, OSError):
            await self._journal.discard(str(model.captured))
            raise
        result = FutureResult.of({"path": operation.path, "model_id": model.id, "type": "load_weights"})
        return OperationResult(result=result, records=(model,))

    async def _fork(self, operation: ForkModel, model: Model, engine: Engine) -> OperationResult:
        """Make a shadow of a checkpoint or of a model in training. No state is captured: a shadow is not restored."""
        source: str | SavedAdapter = operation.source
        if operation.checkpoint:
            checkpoint = self._store.find(Checkpoint, operation.checkpoint)
            if checkpoint is None:
                raise NotFound(f"Checkpoint {operation.path} was deleted before it could be loaded.", "Load another.")
            source = await self._checkpoints.source(checkpoint)
        parameters = await engine.fork(model.id, source, optimizer=operation.optimizer)
        self._store.shadows[model.id].size_bytes = BYTES_PER_PARAMETER * parameters
        result = FutureResult.of({"path": operation.path, "model_id": model.id, "type": "load_weights"})
        return OperationResult(result=result, records=(replace(model, state="live"),))

    async def _save_state(
        self, request: QueuedRequest, operation: SaveState, model: Model, engine: Engine
    ) -> OperationResult:
        existing = self._checkpoints.by_name(model.id, "weights", operation.name)
        if existing is not None and not operation.overwrite:
            raise BadRequest(f"{existing.path} exists.", "Choose another name or pass overwrite=True.")
        checkpoint = _checkpoint(
            request, model, kind="weights", name=operation.name, optimizer=True, **_options(operation)
        )
        with self._checkpoints.new_folder(checkpoint.id) as folder:
            size = await engine.save(model.id, folder, optimizer=True)
        checkpoint = replace(checkpoint, size_bytes=size, digest=await self._checkpoints.publish(checkpoint.id))
        result = FutureResult.of({"path": checkpoint.path, "type": "save_weights"})
        if existing is None:
            return OperationResult(result=result, records=(checkpoint,))
        existing = replace(existing, deleted=True)  # in the same transaction: a name means one checkpoint at any time
        return OperationResult(result=result, records=(existing, checkpoint), replaced=existing)

    async def _save_sampler(
        self, request: QueuedRequest, operation: SaveSampler, model: Model, engine: Engine
    ) -> OperationResult:
        if operation.name is None:
            return await self._save_unnamed(request, operation, model, engine)
        self._check_new_name(model, "sampler_weights", operation.name)
        checkpoint = _checkpoint(request, model, kind="sampler_weights", name=operation.name, **_options(operation))
        await engine.capture(model.id, checkpoint.id)
        try:
            with self._checkpoints.new_folder(checkpoint.id) as folder:
                size = await engine.persist(checkpoint.id, folder)
        except EngineDied:
            raise
        except (TinsmithError, OSError):
            await engine.detach(checkpoint.id)
            raise
        checkpoint = replace(checkpoint, size_bytes=size, digest=await self._checkpoints.publish(checkpoint.id))
        result = FutureResult.of({"path": checkpoint.path, "type": "save_weights_for_sampler"})
        return OperationResult(result=result, records=(checkpoint,))

    async def _save_unnamed(
        self, request: QueuedRequest, operation: SaveSampler, model: Model, engine: Engine
    ) -> OperationResult:
        """Create a sampling session on the current weights, which the engine holds until they are on disk.

        An inflight version replaces the version that the model's inflight sampling sessions used so far.
        """
        sampler_id = operation.sampler_id or ""
        if self._store.find(SamplingSession, sampler_id) is not None:
            raise BadRequest(f"Sampling session {sampler_id} exists.", "Give each its own sampling_session_seq_id.")
        await self._writer.wait_for_room()
        version = _checkpoint(request, model, kind="ephemeral", name=sampler_id, ready=False, **_options(operation))
        await engine.capture(model.id, version.id)
        sampler = SamplingSession(
            id=sampler_id,
            owner=request.owner,
            session_id=model.session_id,
            base_model=model.base_model,
            created=time.time(),
            version=None if operation.inflight else version.id,
            inflight_of=model.id if operation.inflight else None,
        )
        result = FutureResult.of({"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})
        if not operation.inflight:
            return OperationResult(result=result, records=(version, sampler), unwritten=version)
        records = (version, sampler, replace(model, inflight=version.id))
        replaced = self._store.find(Checkpoint, model.inflight) if model.inflight is not None else None
        return OperationResult(result=result, records=records, unwritten=version, replaced=replaced)

    async def _save_external(
        self, request: QueuedRequest, operation: SaveExternal, model: Model, engine: Engine
    ) -> OperationResult:
        """Save the weights in PEFT's layout. What is to be encrypted is in the clear only in an incomplete folder."""
        self._check_new_name(model, "external_weights", operation.name)
        expires = expiry(operation.ttl_seconds)
        checkpoint = _checkpoint(request, model, kind="external_weights", name=operation.name, expires=expires)
        with self._checkpoints.new_folder(checkpoint.id) as folder:
            if operation.recipients:
                plain = folder.with_name(f".{checkpoint.id}.plain")
                try:
                    await engine.save(model.id, plain, optimizer=False)
                    await self._checkpoints.bring(plain)
                    size = await asyncio.to_thread(encrypt, plain, folder, operation.recipients)
                finally:
                    await asyncio.to_thread(shutil.rmtree, plain, ignore_errors=True)
                    await asyncio.to_thread(remove_unfinished, plain)
            else:
                size = await engine.save(model.id, folder, optimizer=False)
        checkpoint = replace(checkpoint, size_bytes=size, digest=await self._checkpoints.publish(checkpoint.id))
        result = FutureResult.of({"path": checkpoint.path, "size_bytes": size, "type": "save_weights_external"})
        return OperationResult(result=result, records=(checkpoint,))

    def _check_new_name(self, model: Model, kind: str, name: str) -> None:
        existing = self._checkpoints.by_name(model.id, kind, name)
        if existing is not None:
            raise BadRequest(f"{existing.path} exists.", "Choose another name or delete it first.")


def _options(operation: SaveState | SaveSampler) -> dict[str, Any]:
    return {"expires": expiry(operation.ttl_seconds), "metadata": operation.metadata}


def _checkpoint(request: QueuedRequest, model: Model, **values: Any) -> Checkpoint:
    return Checkpoint(
        id=uuid.uuid4().hex,
        owner=request.owner,
        run=model.id,
        base_model=model.base_model,
        lora=model.lora,
        created=time.time(),
        made_by=request.id,
        **values,
    )


class PostCommit:
    """What follows from the stored results of one engine's operations."""

    def __init__(
        self,
        host: EngineHost,
        store: Store,
        checkpoints: Checkpoints,
        journal: Journal,
        writer: BackgroundWriter,
        audit_log: AuditLog,
    ) -> None:
        self._host = host
        self._store = store
        self._checkpoints = checkpoints
        self._journal = journal
        self._writer = writer
        self._audit_log = audit_log

    async def run(self, request: QueuedRequest, done: OperationResult, state: ModelState) -> None:
        """Update the model's state and the audit log, delete what was replaced, capture. Raises EngineDied only."""
        state.load_finished.set()
        for record in done.records:
            if isinstance(record, Checkpoint):
                self._checkpoints.recorded(record.id)
        if done.unwritten is not None:
            self._writer.schedule(done.unwritten)
        if isinstance(request.operation, LoadWeights):
            state.updated_seq, state.uncaptured_steps = request.seq, 0
        elif isinstance(request.operation, OptimStep):
            state.updated_seq, state.uncaptured_steps = request.seq, state.uncaptured_steps + 1
        self._audit(request, done)
        await self._attempt(request, lambda: self._delete_replaced(done))
        await self._attempt(request, lambda: self._capture(request, done, state))

    async def _attempt(self, request: QueuedRequest, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except EngineDied:
            raise
        except Exception:  # the request has succeeded, whatever fails here
            log.exception("The follow-up work of request %s failed.", request.id)

    def _audit(self, request: QueuedRequest, done: OperationResult) -> None:
        for record in done.records:
            if isinstance(record, Checkpoint) and record.kind != "ephemeral":
                if record.deleted:
                    self._audit_log.checkpoint_changed(record, "checkpoint_overwritten", request.owner)
                else:
                    self._audit_log.checkpoint_created(record, request.owner)

    async def _delete_replaced(self, done: OperationResult) -> None:
        if done.replaced is not None:
            await self._checkpoints.delete(done.replaced)
            if self._store.find(Checkpoint, done.replaced.id) is None:
                await self._host.detach(done.replaced.id)

    async def _capture(self, request: QueuedRequest, done: OperationResult, state: ModelState) -> None:
        """Capture a state that is on disk anyway, or a new one after enough steps. A failure is retried later."""
        if request.model_id in self._store.shadows:
            return
        model = self._store.find(Model, request.model_id)
        assert model is not None
        if isinstance(request.operation, LoadWeights):
            await self._journal.adopt(model)
        elif self._writer.has_unwritten_versions(model):
            return
        elif isinstance(request.operation, OptimStep):
            if state.uncaptured_steps < self._journal.capture_every or not self._journal.has_room:
                return
            await self._journal.capture(model, state.updated_seq, self._host.engine)
            state.uncaptured_steps = 0
        elif isinstance(request.operation, SaveState):
            [saved] = [record for record in done.records if isinstance(record, Checkpoint) and not record.deleted]
            captured = await self._journal.link(model, self._checkpoints, saved, state.updated_seq)
            await self._journal.adopt(captured)
            state.uncaptured_steps = 0


def pass_result(result: PassResult | TinsmithError) -> FutureResult:
    """Return the stored result of a forward or backward pass. Raises EngineDied if the engine died during the pass."""
    if isinstance(result, EngineDied):
        raise result
    if isinstance(result, TinsmithError):
        return FutureResult.failure(result)
    return FutureResult(body=encode_pass(result), media=PROTOBUF)
