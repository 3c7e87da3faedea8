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
from tinsmith.service.observability.audit import Chronicle
from tinsmith.service.storage.records import (
    Answer,
    Checkpoint,
    Create,
    Load,
    Model,
    Row,
    Sampler,
    SaveExternal,
    SaveSampler,
    SaveState,
    Step,
)
from tinsmith.service.storage.store import Held, Store
from tinsmith.service.tenancy.quotas import Limits
from tinsmith.service.training.background_writes import Behind
from tinsmith.service.training.journal import Journal
from tinsmith.service.training.model_state import Line

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A request that succeeded: its answer, the records that it made or changed, and what is still to be done."""

    answer: Answer
    records: tuple[Held, ...] = ()
    replaced: Checkpoint | None = None
    """A checkpoint whose name was given anew, or an inflight version that has a successor."""
    behind: Checkpoint | None = None
    """A version to be written to disk behind the answer."""


class Effects:
    """Carries requests out on an engine and describes what came of it."""

    def __init__(
        self, store: Store, checkpoints: Checkpoints, journal: Journal, limits: Limits, behind: Behind
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._journal = journal
        self._limits = limits
        self._behind = behind

    async def perform(self, row: Row, model: Model, engine: Engine) -> Done:
        """Run one barrier row. Raises TinsmithError if it fails."""
        try:
            return await self._perform(row, model, engine)
        except OSError as error:
            log.exception("Request %s failed.", row.id)
            told = f"The server's data folder failed: {error.strerror or 'files could not be copied'}."
            raise EngineError(told, "Its operator finds more in the server's log.") from error

    async def _perform(self, row: Row, model: Model, engine: Engine) -> Done:
        work = row.work
        if isinstance(work, Create):
            await engine.create(model.id, model.lora)
            return Done(
                answer=Answer.of({"model_id": model.id, "type": "create_model"}),
                records=(replace(model, state="live"),),
            )
        if isinstance(work, Step):
            return Done(answer=Answer.of({"metrics": await engine.step(model.id, work.adam)}))
        if isinstance(work, Load):
            return await self._load(row, work, model, engine)
        self._limits.checkpoint(row.owner)  # again: those queued before this one have been written meanwhile
        if isinstance(work, SaveState):
            return await self._save_state(row, work, model, engine)
        if isinstance(work, SaveSampler):
            return await self._save_sampler(row, work, model, engine)
        if isinstance(work, SaveExternal):
            return await self._save_external(row, work, model, engine)
        raise TypeError(f"{type(work).__name__} is no barrier")

    async def _load(self, row: Row, work: Load, model: Model, engine: Engine) -> Done:
        """The loaded folder is the model's captured state from here on, and is so before the engine has it: its owner
        may delete the checkpoint meanwhile."""
        checkpoint = self._store.find(Checkpoint, work.checkpoint)
        if checkpoint is None:
            raise NotFound(f"Checkpoint {work.path} was deleted before it could be loaded.", "Load another.")
        await self._behind.settle(model)  # nothing replays the requests before a load, nor makes their versions again
        captured = await self._journal.link(model, self._checkpoints.folder(checkpoint.id), row.seq)
        folder = self._journal.folder(captured)
        try:
            await engine.load(model.id, folder, optimizer=work.optimizer)
        except (TinsmithError, OSError):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise
        answer = Answer.of({"path": work.path, "model_id": model.id, "type": "load_weights"})
        model = replace(model, state="live", captured=captured, captured_optimizer=work.optimizer, covered=row.seq)
        return Done(answer=answer, records=(model,))

    async def _save_state(self, row: Row, work: SaveState, model: Model, engine: Engine) -> Done:
        standing = self._checkpoints.named(model.id, "weights", work.name)
        if standing is not None and not work.overwrite:
            raise BadRequest(f"{standing.path} exists.", "Choose another name or pass overwrite=True.")
        made = _checkpoint(row, model, kind="weights", name=work.name, optimizer=True, **_kept(work))
        size = await engine.save(model.id, self._checkpoints.folder(made.id), optimizer=True)
        made = replace(made, size_bytes=size)
        answer = Answer.of({"path": made.path, "type": "save_weights"})
        if standing is None:
            return Done(answer=answer, records=(made,))
        standing = replace(standing, deleted=True)  # in one transaction: a name means one checkpoint at any time
        return Done(answer=answer, records=(standing, made), replaced=standing)

    async def _save_sampler(self, row: Row, work: SaveSampler, model: Model, engine: Engine) -> Done:
        if work.name is None:
            return await self._save_unnamed(row, work, model, engine)
        standing = self._checkpoints.named(model.id, "sampler_weights", work.name)
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
        answer = Answer.of({"path": made.path, "type": "save_weights_for_sampler"})
        return Done(answer=answer, records=(made,))

    async def _save_external(self, row: Row, work: SaveExternal, model: Model, engine: Engine) -> Done:
        """Weights alone, in PEFT's layout. What is to be encrypted is in the clear only beside its place."""
        standing = self._checkpoints.named(model.id, "external_weights", work.name)
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
        answer = Answer.of({"path": made.path, "size_bytes": size, "type": "save_weights_external"})
        return Done(answer=answer, records=(made,))

    async def _save_unnamed(self, row: Row, work: SaveSampler, model: Model, engine: Engine) -> Done:
        """Usable at once from the engine's memory; the folder follows.

        An inflight one takes the place of the version that the model's inflight sessions used so far.
        """
        sampler_id = work.sampler_id or ""
        if self._store.find(Sampler, sampler_id) is not None:
            raise BadRequest(f"Sampling session {sampler_id} exists.", "Give each its own sampling_session_seq_id.")
        made = _checkpoint(row, model, kind="ephemeral", name=sampler_id, ready=False, **_kept(work))
        await engine.capture(model.id, made.id)
        sampler = Sampler(
            id=sampler_id,
            owner=row.owner,
            session_id=model.session_id,
            base_model=model.base_model,
            created=time.time(),
            version=None if work.inflight else made.id,
            inflight_of=model.id if work.inflight else None,
        )
        answer = Answer.of({"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})
        if not work.inflight:
            return Done(answer=answer, records=(made, sampler), behind=made)
        records = (made, sampler, replace(model, inflight=made.id))
        return Done(answer=answer, records=records, behind=made, replaced=self._standing(model))

    def _standing(self, model: Model) -> Checkpoint | None:
        return self._store.find(Checkpoint, model.inflight) if model.inflight is not None else None


def _kept(work: SaveState | SaveSampler) -> dict[str, Any]:
    return {"expires": expiry(work.ttl_seconds), "metadata": work.metadata}


def _checkpoint(row: Row, model: Model, **values: Any) -> Checkpoint:
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


class Aftermath:
    """Of one engine's barriers."""

    def __init__(
        self,
        host: EngineHost,
        store: Store,
        checkpoints: Checkpoints,
        journal: Journal,
        behind: Behind,
        chronicle: Chronicle,
    ) -> None:
        self._host = host
        self._store = store
        self._checkpoints = checkpoints
        self._journal = journal
        self._behind = behind
        self._chronicle = chronicle

    async def follow(self, row: Row, done: Done, line: Line) -> None:
        """Do what is still to be done. Raises EngineDied alone."""
        line.warm.set()
        if done.behind is not None:
            self._behind.write(done.behind)
        if isinstance(row.work, Load):
            line.updated, line.steps = row.seq, 0
        elif isinstance(row.work, Step):
            line.updated, line.steps = row.seq, line.steps + 1
        for one in (one for one in done.records if isinstance(one, Checkpoint) and one.kind != "ephemeral"):
            if one.deleted:
                self._chronicle.changed(one, "checkpoint_overwritten", row.owner)
            else:
                self._chronicle.made(one, row.owner)
        await self._tried(row, lambda: self._forget(done))
        await self._tried(row, lambda: self._capture(row, done, line))

    async def _tried(self, row: Row, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except EngineDied:
            raise
        except Exception:  # the request is done whatever becomes of this
            log.exception("What follows from request %s could not be done.", row.id)

    async def _forget(self, done: Done) -> None:
        if done.replaced is not None:
            await self._checkpoints.delete(done.replaced)
            if self._store.find(Checkpoint, done.replaced.id) is None:
                await self._host.detach(done.replaced.id)

    async def _capture(self, row: Row, done: Done, line: Line) -> None:
        """A state that is on disk anyway, or one more after many steps. What fails is tried again after the next."""
        model = self._store.find(Model, row.model_id)
        assert model is not None
        if isinstance(row.work, Load):
            await self._journal.adopt(model)
        elif self._behind.owes(model):
            return
        elif isinstance(row.work, Step) and line.steps >= self._journal.every:
            await self._journal.capture(model, line.updated, self._host.engine)
            line.steps = 0
        elif isinstance(row.work, SaveState):
            [made] = [one for one in done.records if isinstance(one, Checkpoint) and not one.deleted]
            linked = await self._journal.link(model, self._checkpoints.folder(made.id), line.updated)
            await self._journal.adopt(replace(model, captured=linked, captured_optimizer=True, covered=line.updated))
            line.steps = 0
