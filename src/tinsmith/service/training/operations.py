"""What each training request but forward_backward does: to the engine, to the records, and what it answers.

Raises TinsmithError when the request fails; then nothing changed. The worker calls this in each model's order.
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

from tinsmith.engine.base import Engine
from tinsmith.errors import BadRequest, EngineDied, EngineError, NotFound, TinsmithError
from tinsmith.service.checkpoints import Checkpoints, expiry
from tinsmith.service.encryption import encrypt
from tinsmith.service.engines.host import EngineHost
from tinsmith.service.observability.audit import AuditLog
from tinsmith.service.storage.records import (
    Checkpoint,
    CreateModel,
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

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationResult:
    """A request that succeeded: its answer, the records that it made or changed, and what is still to be done."""

    result: FutureResult
    records: tuple[StoredRecord, ...] = ()
    replaced: Checkpoint | None = None
    """A checkpoint whose name was given anew, or an inflight version that has a successor."""
    unwritten: Checkpoint | None = None
    """A version that the background writer writes after the result is published."""


class Operations:
    """Carries requests out on an engine and describes what came of it."""

    def __init__(
        self, store: Store, checkpoints: Checkpoints, journal: Journal, quotas: QuotaEnforcer, writer: BackgroundWriter
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._journal = journal
        self._quota = quotas
        self._writer = writer

    async def perform(self, row: QueuedRequest, model: Model, engine: Engine) -> OperationResult:
        """Run one barrier row. Raises TinsmithError if it fails."""
        try:
            return await self._perform(row, model, engine)
        except OSError as error:
            log.exception("Request %s failed.", row.id)
            told = f"The server's data folder failed: {error.strerror or 'files could not be copied'}."
            raise EngineError(told, "Its operator finds more in the server's log.") from error

    async def _perform(self, row: QueuedRequest, model: Model, engine: Engine) -> OperationResult:
        work = row.operation
        if isinstance(work, CreateModel):
            await engine.create(model.id, model.lora)
            return OperationResult(
                result=FutureResult.of({"model_id": model.id, "type": "create_model"}),
                records=(replace(model, state="live"),),
            )
        if isinstance(work, OptimStep):
            return OperationResult(result=FutureResult.of({"metrics": await engine.step(model.id, work.adam)}))
        if isinstance(work, LoadWeights):
            return await self._load(row, work, model, engine)
        self._quota.check_storage(row.owner)  # again: those queued before this one have been written meanwhile
        if isinstance(work, SaveState):
            return await self._save_state(row, work, model, engine)
        if isinstance(work, SaveSampler):
            return await self._save_sampler(row, work, model, engine)
        if isinstance(work, SaveExternal):
            return await self._save_external(row, work, model, engine)
        raise TypeError(f"{type(work).__name__} is no barrier")

    async def _load(self, row: QueuedRequest, work: LoadWeights, model: Model, engine: Engine) -> OperationResult:
        """The loaded folder is the model's captured state from here on, and is so before the engine has it: its owner
        may delete the checkpoint meanwhile."""
        checkpoint = self._store.find(Checkpoint, work.checkpoint)
        if checkpoint is None:
            raise NotFound(f"Checkpoint {work.path} was deleted before it could be loaded.", "Load another.")
        await self._writer.flush(model)  # nothing replays the requests before a load, nor makes their versions again
        captured = await self._journal.link(model, self._checkpoints.folder(checkpoint.id), row.seq)
        folder = self._journal.folder(captured)
        try:
            await engine.load(model.id, folder, optimizer=work.optimizer)
        except (TinsmithError, OSError):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise
        answer = FutureResult.of({"path": work.path, "model_id": model.id, "type": "load_weights"})
        model = replace(model, state="live", captured=captured, captured_optimizer=work.optimizer, covered=row.seq)
        return OperationResult(result=answer, records=(model,))

    async def _save_state(self, row: QueuedRequest, work: SaveState, model: Model, engine: Engine) -> OperationResult:
        standing = self._checkpoints.by_name(model.id, "weights", work.name)
        if standing is not None and not work.overwrite:
            raise BadRequest(f"{standing.path} exists.", "Choose another name or pass overwrite=True.")
        made = _checkpoint(row, model, kind="weights", name=work.name, optimizer=True, **_kept(work))
        size = await engine.save(model.id, self._checkpoints.folder(made.id), optimizer=True)
        made = replace(made, size_bytes=size)
        answer = FutureResult.of({"path": made.path, "type": "save_weights"})
        if standing is None:
            return OperationResult(result=answer, records=(made,))
        standing = replace(standing, deleted=True)  # in one transaction: a name means one checkpoint at any time
        return OperationResult(result=answer, records=(standing, made), replaced=standing)

    async def _save_sampler(
        self, row: QueuedRequest, work: SaveSampler, model: Model, engine: Engine
    ) -> OperationResult:
        if work.name is None:
            return await self._save_unnamed(row, work, model, engine)
        standing = self._checkpoints.by_name(model.id, "sampler_weights", work.name)
        if standing is not None:
            raise BadRequest(f"{standing.path} exists.", "Choose another name or delete it first.")
        made = _checkpoint(row, model, kind="sampler_weights", name=work.name, **_kept(work))
        await engine.capture(model.id, made.id)
        try:
            size = await engine.persist(made.id, self._checkpoints.folder(made.id))
        except EngineDied:
            raise
        except (TinsmithError, OSError):
            await engine.detach(made.id)
            raise
        made = replace(made, size_bytes=size)
        answer = FutureResult.of({"path": made.path, "type": "save_weights_for_sampler"})
        return OperationResult(result=answer, records=(made,))

    async def _save_external(
        self, row: QueuedRequest, work: SaveExternal, model: Model, engine: Engine
    ) -> OperationResult:
        """Weights alone, in PEFT's layout. What is to be encrypted is in the clear only beside its place."""
        standing = self._checkpoints.by_name(model.id, "external_weights", work.name)
        if standing is not None:
            raise BadRequest(f"{standing.path} exists.", "Choose another name or delete it first.")
        made = _checkpoint(row, model, kind="external_weights", name=work.name, expires=expiry(work.ttl_seconds))
        folder = self._checkpoints.folder(made.id)
        if work.recipients:
            plain = folder.with_name(f".{made.id}.plain")
            try:
                await engine.save(model.id, plain, optimizer=False)
                size = await asyncio.to_thread(encrypt, plain, folder, work.recipients)
            finally:
                await asyncio.to_thread(shutil.rmtree, plain, ignore_errors=True)
        else:
            size = await engine.save(model.id, folder, optimizer=False)
        made = replace(made, size_bytes=size)
        answer = FutureResult.of({"path": made.path, "size_bytes": size, "type": "save_weights_external"})
        return OperationResult(result=answer, records=(made,))

    async def _save_unnamed(
        self, row: QueuedRequest, work: SaveSampler, model: Model, engine: Engine
    ) -> OperationResult:
        """Usable at once from the engine's memory; the folder follows.

        An inflight one takes the place of the version that the model's inflight sessions used so far.
        """
        sampler_id = work.sampler_id or ""
        if self._store.find(SamplingSession, sampler_id) is not None:
            raise BadRequest(f"Sampling session {sampler_id} exists.", "Give each its own sampling_session_seq_id.")
        made = _checkpoint(row, model, kind="ephemeral", name=sampler_id, ready=False, **_kept(work))
        await engine.capture(model.id, made.id)
        sampler = SamplingSession(
            id=sampler_id,
            owner=row.owner,
            session_id=model.session_id,
            base_model=model.base_model,
            created=time.time(),
            version=None if work.inflight else made.id,
            inflight_of=model.id if work.inflight else None,
        )
        answer = FutureResult.of({"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})
        if not work.inflight:
            return OperationResult(result=answer, records=(made, sampler), unwritten=made)
        records = (made, sampler, replace(model, inflight=made.id))
        return OperationResult(result=answer, records=records, unwritten=made, replaced=self._standing(model))

    def _standing(self, model: Model) -> Checkpoint | None:
        return self._store.find(Checkpoint, model.inflight) if model.inflight is not None else None


def _kept(work: SaveState | SaveSampler) -> dict[str, Any]:
    return {"expires": expiry(work.ttl_seconds), "metadata": work.metadata}


def _checkpoint(row: QueuedRequest, model: Model, **values: Any) -> Checkpoint:
    return Checkpoint(
        id=uuid.uuid4().hex,
        owner=row.owner,
        run=model.id,
        base_model=model.base_model,
        lora=model.lora,
        created=time.time(),
        made_by=row.id,
        **values,
    )


class PostCommit:
    """Of one engine's barriers."""

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

    async def run(self, row: QueuedRequest, done: OperationResult, state: ModelState) -> None:
        """Do what is still to be done. Raises EngineDied alone."""
        state.load_finished.set()
        if done.unwritten is not None:
            self._writer.schedule(done.unwritten)
        if isinstance(row.operation, LoadWeights):
            state.updated_seq, state.uncaptured_steps = row.seq, 0
        elif isinstance(row.operation, OptimStep):
            state.updated_seq, state.uncaptured_steps = row.seq, state.uncaptured_steps + 1
        for one in (one for one in done.records if isinstance(one, Checkpoint) and one.kind != "ephemeral"):
            if one.deleted:
                self._audit_log.checkpoint_changed(one, "checkpoint_overwritten", row.owner)
            else:
                self._audit_log.checkpoint_created(one, row.owner)
        await self._tried(row, lambda: self._forget(done))
        await self._tried(row, lambda: self._capture(row, done, state))

    async def _tried(self, row: QueuedRequest, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except EngineDied:
            raise
        except Exception:  # the request is done whatever becomes of this
            log.exception("What follows from request %s could not be done.", row.id)

    async def _forget(self, done: OperationResult) -> None:
        if done.replaced is not None:
            await self._checkpoints.delete(done.replaced)
            if self._store.find(Checkpoint, done.replaced.id) is None:
                await self._host.detach(done.replaced.id)

    async def _capture(self, row: QueuedRequest, done: OperationResult, state: ModelState) -> None:
        """A state that is on disk anyway, or one more after many steps. What fails is tried again after the next."""
        model = self._store.find(Model, row.model_id)
        assert model is not None
        if isinstance(row.operation, LoadWeights):
            await self._journal.adopt(model)
        elif self._writer.has_unwritten_versions(model):
            return
        elif isinstance(row.operation, OptimStep) and state.uncaptured_steps >= self._journal.capture_every:
            await self._journal.capture(model, state.updated_seq, self._host.engine)
            state.uncaptured_steps = 0
        elif isinstance(row.operation, SaveState):
            [made] = [one for one in done.records if isinstance(one, Checkpoint) and not one.deleted]
            linked = await self._journal.link(model, self._checkpoints.folder(made.id), state.updated_seq)
            await self._journal.adopt(
                replace(model, captured=linked, captured_optimizer=True, covered=state.updated_seq)
            )
            state.uncaptured_steps = 0
