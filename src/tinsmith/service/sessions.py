"""Sessions: how they begin, what they hold, how they end. And the clock of everything that ends by itself.

A session ends when its client finishes it or falls silent for long; named checkpoints stay, all else is cleared away.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress

from tinsmith.errors import BadRequest, EngineDied, NotFound
from tinsmith.service.checkpoints import Checkpoints
from tinsmith.service.observability.audit import AuditLog
from tinsmith.service.observability.logs import add_log_context
from tinsmith.service.results.futures import Futures
from tinsmith.service.storage.records import Checkpoint, CustomLoss, Model, SamplingSession, Session
from tinsmith.service.storage.store import Store
from tinsmith.service.training.journal import Journal
from tinsmith.service.training.worker import Worker
from tinsmith.service.wire.schemas import SessionBody


class SessionCleanup:
    """Of all sessions of one store."""

    def __init__(
        self,
        store: Store,
        checkpoints: Checkpoints,
        journal: Journal,
        futures: Futures,
        workers: Mapping[str, Worker],
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._journal = journal
        self._futures = futures
        self._workers = workers
        self._leaving: dict[str, Model] = {}
        """Models that were told to leave, as they were then: one that changed since is told again."""

    async def run(self) -> None:
        """Models leave once all that they promised is done; unnamed versions, losses and untold samples go."""
        await self._end_models()
        if losses := [one for one in self._store.all(CustomLoss) if self._is_over(one.session_id)]:
            await self._store.remove(*losses)
        self._futures.drop_ended(self._has_ended)
        for one in self._store.all(Checkpoint):
            if one.deleted or (one.kind == "ephemeral" and self._is_orphan(one)):
                await self._release(one.id, one.base_model)

    async def release_versions(self, session: Session) -> None:
        """The versions that its sampling sessions used leave the engine, unless others use them."""
        for sampler in self._store.all(SamplingSession):
            if sampler.session_id == session.id and sampler.version is not None:
                await self._release(sampler.version, sampler.base_model)

    async def _end_models(self) -> None:
        left = [one for one in self._store.all(Model) if one.state != "ended" and self._is_over(one.session_id)]
        for model in (one for one in left if one.base_model in self._workers):
            if self._leaving.get(model.id) is not model:
                self._workers[model.base_model].unload(model)
        self._leaving = {model.id: model for model in left}
        unserved = [one for one in left if one.base_model not in self._workers]
        if unserved:
            highest = await self._store.highest_seqs()
            for model in unserved:
                accepted, finished = highest.get(model.id, (0, 0))
                if accepted <= finished:  # what is promised still runs when its base model is served again
                    await self._journal.forget(model)

    async def _release(self, version: str, base_model: str) -> None:
        if not await self._checkpoints.release(version):
            return
        worker = self._workers.get(base_model)
        if worker is not None:
            with suppress(EngineDied):  # which has forgotten all of them
                await worker.host.detach(version)

    def _is_over(self, session_id: str) -> bool:
        session = self._store.find(Session, session_id)
        return session is None or session.ended is not None

    def _is_orphan(self, version: Checkpoint) -> bool:
        model = self._store.find(Model, version.run)
        return model is None or self._is_over(model.session_id)

    def _has_ended(self, sampler_id: str) -> bool:
        sampler = self._store.find(SamplingSession, sampler_id)
        return sampler is None or self._is_over(sampler.session_id)


SEEN_WRITE_S = 60.0
"""A heartbeat comes every 10 s; writing each down would be noise."""
PRUNE_S = 600.0
CLEAR_S = 60.0
"""Between two looks at what sessions that have ended hold, or came to hold since."""
RETURN_S = 600.0


class Sessions:
    """The sessions of one store."""

    def __init__(
        self,
        store: Store,
        checkpoints: Checkpoints,
        cleanup: SessionCleanup,
        timeout_s: float,
        retention_s: float,
        audit_log: AuditLog,
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._cleanup = cleanup
        self._timeout_s = timeout_s
        self._retention_s = retention_s
        self._audit_log = audit_log
        # After a restart clients get a while to come back, however long this server was down.
        back_by = time.time() - timeout_s + min(timeout_s, RETURN_S)
        self._seen = {one.id: back_by for one in store.all(Session) if one.ended is None}
        self._by_idempotency = {
            (one.owner, one.idempotency_key): one.id for one in store.all(Session) if one.idempotency_key
        }
        self._changed = asyncio.Event()

    async def begin(self, owner: str, idempotency_key: str | None, told: SessionBody) -> Session:
        """A new session, or the one that the same key made before."""
        known = self._store.find(Session, self._by_idempotency.get((owner, idempotency_key or ""), ""))
        if known is not None:
            return known
        now = time.time()
        session = Session(
            id=str(uuid.uuid4()),
            owner=owner,
            created=now,
            seen=now,
            idempotency_key=idempotency_key,
            tags=told.tags,
            metadata=told.user_metadata or {},
            project_id=told.project_id,
            display_name=told.display_name,
        )
        await self._store.put(session)
        if idempotency_key:
            self._by_idempotency[owner, idempotency_key] = session.id
        self._changed.set()
        return session

    def find(self, session_id: str, owner: str) -> Session:
        """The session, ended or not. Raises NotFound."""
        session = self._store.find(Session, session_id)
        if session is None or session.owner != owner:
            raise NotFound(f"There is no session {session_id}.", "Create one.")
        add_log_context(session_id=session_id)
        return session

    def touch(self, session_id: str, owner: str) -> Session:
        """The session, which this call keeps alive. Raises BadRequest if it has ended."""
        session = self.find(session_id, owner)
        if session.ended is not None:
            raise BadRequest(
                f"Session {session_id} has ended ({session.ended}).", "Create another and load a checkpoint into it."
            )
        self._seen[session_id] = time.time()
        return session

    async def heartbeat(self, session_id: str, owner: str) -> None:
        """As `alive`; now and then it is written down, for the case of a restart."""
        session = self.touch(session_id, owner)
        if time.time() - session.seen > SEEN_WRITE_S:
            await self._store.update(Session, session_id, seen=time.time())

    async def end(self, session: Session, reason: str, detail: str | None = None) -> None:
        """The first reason counts."""
        if session.ended is not None:
            return
        await self._store.update(Session, session.id, ended=reason, detail=detail)
        self._seen.pop(session.id, None)
        self._changed.set()
        await self._cleanup.release_versions(session)

    async def run(self) -> None:
        """For ever: end what is silent, delete what is over, forget what is old; sleep until the next of these."""
        pruned = time.time()
        while True:
            self._changed.clear()
            for one in await self._checkpoints.expire():
                self._audit_log.checkpoint_changed(one, "checkpoint_expired", "tinsmith")
            now = time.time()
            for session in self._store.all(Session):
                if session.ended is None and self._last_seen(session) + self._timeout_s <= now:
                    await self.end(session, "silence")
            await self._cleanup.run()
            if pruned + PRUNE_S <= now:
                pruned = now
                ended = [model.id for model in self._store.all(Model) if model.state == "ended"]
                await self._store.prune(now - self._retention_s, ended)
            await self._sleep(min(pruned + PRUNE_S, now + CLEAR_S))

    async def _sleep(self, until: float) -> None:
        ends: list[float] = [
            self._last_seen(session) + self._timeout_s for session in self._store.all(Session) if session.ended is None
        ]
        expiry = self._checkpoints.next_expiry()
        wake = min([until, *ends, until if expiry is None else expiry])
        with suppress(TimeoutError):
            async with asyncio.timeout(
                max(wake - time.time(), 0.01)
            ):  # wait_for of Python 3.11 may lose a cancellation
                await self._changed.wait()

    def wake(self) -> None:
        """Something may end sooner than was known."""
        self._changed.set()

    def _last_seen(self, session: Session) -> float:
        return max(session.seen, self._seen.get(session.id, 0.0))
