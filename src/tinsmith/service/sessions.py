"""Sessions: creation, heartbeats, expiry, and the cleanup of what ended sessions hold.

A session ends when its client finishes it or is silent for too long. Named checkpoints stay; everything else that the
session made is removed.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from tinsmith.errors import BadRequest, EngineDied, Forbidden, NotFound
from tinsmith.service.budgets.activity import SessionActivity
from tinsmith.service.budgets.disk import DiskMonitor
from tinsmith.service.budgets.versions import IN_USE_S, VersionLimits
from tinsmith.service.checkpoints import Checkpoints
from tinsmith.service.observability.audit import AuditLog
from tinsmith.service.observability.logs import add_log_context
from tinsmith.service.results.futures import Futures
from tinsmith.service.storage.records import Checkpoint, CustomLoss, Model, SamplingSession, Session
from tinsmith.service.storage.retention import Retention, prune, remove_ended
from tinsmith.service.storage.store import Store
from tinsmith.service.training.journal import Journal
from tinsmith.service.training.worker import Worker
from tinsmith.service.wire.schemas import SessionBody

SEEN_WRITE_S = 60.0
"""Time between two stored heartbeats of a session: clients send one every 10 s."""
PRUNE_S = 600.0
"""Time between two removals of old results and records."""
CLEANUP_S = 60.0
"""Time between two cleanups of ended sessions."""
MAX_OPEN_SESSIONS = 10_000
"""Open sessions of a tenant."""
RETURN_S = 600.0
"""Time that clients have to return after a restart of the server, if the session timeout is not shorter."""


class SessionCleanup:
    """Removes what ended sessions hold.

    Each run finds it in the store, so it does not matter when a record was made (a queued save, a model that was being
    created) or what used it until now.
    """

    def __init__(
        self,
        store: Store,
        checkpoints: Checkpoints,
        journal: Journal,
        futures: Futures,
        workers: Mapping[str, Worker],
        versions: VersionLimits,
        disk: DiskMonitor,
    ) -> None:
        self._versions, self._disk = versions, disk
        self._store = store
        self._checkpoints = checkpoints
        self._journal = journal
        self._futures = futures
        self._workers = workers
        self._unloading: dict[str, Model] = {}
        """Models that are queued for unloading, as they were then: a model that changed since is queued again."""

    async def run(self) -> None:
        """Remove models whose requests have run, idle shadows, unnamed versions, custom losses and completion logs.

        Living models that nobody uses are evicted.
        """
        await self._end_models()
        if losses := [loss for loss in self._store.all(CustomLoss) if self._has_ended(loss.session_id)]:
            await self._store.remove(*losses)
        self._futures.drop_ended(self._sampler_has_ended)
        for checkpoint in self._store.all(Checkpoint):
            if checkpoint.deleted or (checkpoint.kind == "ephemeral" and self._is_orphan(checkpoint)):
                await self._release(checkpoint.id, checkpoint.base_model)
        await self._age_versions()
        for worker in dict.fromkeys(self._workers.values()):
            await worker.evict_idle()

    async def cancel_requests(self, session: Session) -> None:
        """Cancel the queued training requests of a session whose client is gone."""
        for worker in dict.fromkeys(self._workers.values()):
            await worker.cancel_session(session.id)

    async def _age_versions(self) -> None:
        """Delete the unnamed versions that are neither new nor in use, with the sampling sessions on them."""
        limits = self._versions
        if self._disk.is_low:
            limits = replace(limits, retention_s=min(limits.retention_s, IN_USE_S))
        inflight = [model.inflight for model in self._store.all(Model)]
        for version in self._checkpoints.use.aged_out(self._store.all(Checkpoint), inflight, limits):
            await self._store.remove(*self._store.users_of(version.id))  # sampling sessions: no model follows it
            await self._checkpoints.remove(version)
            await self._detach(version.id, version.base_model)

    async def release_versions(self, session: Session) -> None:
        """Detach the versions of the session's sampling sessions from the engine, unless others use them."""
        samplers = [sampler for sampler in self._store.all(SamplingSession) if sampler.session_id == session.id]
        versions = {(each.version, each.base_model) for each in samplers if each.version is not None}
        await asyncio.gather(*(self._release(*version) for version in versions))  # their writes share transactions

    async def _end_models(self) -> None:
        ending = [
            model for model in self._store.all(Model) if model.state != "ended" and self._has_ended(model.session_id)
        ]
        shadows = self._store.shadows.values()
        ending += [shadow.model for shadow in shadows if shadow.idle or self._has_ended(shadow.model.session_id)]
        for model in (model for model in ending if model.base_model in self._workers):
            if self._unloading.get(model.id) is not model:
                self._workers[model.base_model].unload(model)
        self._unloading = {model.id: model for model in ending}
        unserved = [model for model in ending if model.base_model not in self._workers]
        if unserved:
            seqs = await self._store.highest_seqs()
            for model in unserved:
                accepted, finished = seqs.get(model.id, (0, 0))
                if accepted <= finished:  # pending requests run once the base model is served again
                    await self._journal.forget(model)

    async def _release(self, version: str, base_model: str) -> None:
        if await self._checkpoints.release(version):
            await self._detach(version, base_model)

    async def _detach(self, version: str, base_model: str) -> None:
        worker = self._workers.get(base_model)
        if worker is not None:
            with suppress(EngineDied):  # a new engine has no versions
                await worker.host.detach(version)

    def _has_ended(self, session_id: str) -> bool:
        session = self._store.find(Session, session_id)
        return session is None or session.ended is not None

    def _is_orphan(self, version: Checkpoint) -> bool:
        model = self._store.find(Model, version.run)
        return model is None or self._has_ended(model.session_id)

    def _sampler_has_ended(self, sampler_id: str) -> bool:
        sampler = self._store.find(SamplingSession, sampler_id)
        return sampler is None or self._has_ended(sampler.session_id)


class Sessions:
    """The sessions of a store, and the loop that ends what is over."""

    def __init__(
        self,
        store: Store,
        checkpoints: Checkpoints,
        cleanup: SessionCleanup,
        disk: DiskMonitor,
        activity: SessionActivity,
        timeout_s: float,
        retention: Retention,
        audit_log: AuditLog,
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._cleanup = cleanup
        self._disk = disk
        self._activity = activity
        self._timeout_s = timeout_s
        self._retention = retention
        self._audit_log = audit_log
        # After a restart clients have RETURN_S to return, however long the server was down.
        activity.welcome(time.time() - timeout_s + min(timeout_s, RETURN_S))
        self._by_idempotency = {
            (session.owner, session.idempotency_key): session.id
            for session in store.all(Session)
            if session.idempotency_key
        }
        self._beginning: dict[tuple[str, str], asyncio.Task[Session]] = {}
        """Sessions that are being created, by owner and idempotency key."""
        self._wake = asyncio.Event()

    async def begin(self, owner: str, idempotency_key: str | None, body: SessionBody) -> Session:
        """Create a session. The same idempotency key returns the session that it made before.

        Raises Forbidden if the owner has MAX_OPEN_SESSIONS, Busy while the disk is low.
        """
        if not idempotency_key:
            return await self._create(owner, None, body)
        key = (owner, idempotency_key)
        existing = self._store.find(Session, self._by_idempotency.get(key, ""))
        if existing is not None:
            return existing
        if key not in self._beginning:  # else the client, or a proxy, has sent the request twice at once
            self._beginning[key] = asyncio.create_task(self._create(owner, idempotency_key, body))
            self._beginning[key].add_done_callback(lambda _: self._beginning.pop(key))
        return await asyncio.shield(self._beginning[key])

    async def _create(self, owner: str, idempotency_key: str | None, body: SessionBody) -> Session:
        self._disk.require()
        if sum(session.owner == owner for session in self._open_sessions()) >= MAX_OPEN_SESSIONS:
            raise Forbidden(
                f"You have {MAX_OPEN_SESSIONS} open sessions.",
                "Close those that you do not use: ServiceClient.close().",
            )
        now = time.time()
        session = Session(
            id=str(uuid.uuid4()),
            owner=owner,
            created=now,
            seen=now,
            idempotency_key=idempotency_key,
            tags=body.tags,
            metadata=body.user_metadata or {},
            project_id=body.project_id,
            display_name=body.display_name,
        )
        await self._store.put(session)
        self._activity.touch(session.id)
        if idempotency_key:
            self._by_idempotency[owner, idempotency_key] = session.id
        self.wake()
        return session

    def find(self, session_id: str, owner: str) -> Session:
        """Return the owner's session, ended or not. Raises NotFound."""
        session = self._store.find(Session, session_id)
        if session is None or session.owner != owner:
            raise NotFound(f"There is no session {session_id}.", "Create one.")
        add_log_context(session_id=session_id)
        return session

    def touch(self, session_id: str, owner: str) -> Session:
        """Return the session and restart its timeout. Raises BadRequest if the session has ended."""
        session = self.find(session_id, owner)
        if session.ended is not None:
            raise BadRequest(
                f"Session {session_id} has ended ({session.ended}).", "Create another and load a checkpoint into it."
            )
        self._activity.touch(session_id)
        return session

    def polled(self, request_id: str, owner: str) -> None:
        """A client waits for the result of a request, so that its session lives."""
        session = self._store.find(Session, request_id.partition(":")[0])
        if session is not None and session.owner == owner and session.ended is None:
            self._activity.touch(session.id)

    def heartbeat(self, session_id: str, owner: str) -> None:
        """Restart the session's timeout. `store_heartbeats` stores the time: no heartbeat waits for the disk."""
        self.touch(session_id, owner)

    async def end(self, session: Session, reason: str, detail: str | None = None) -> None:
        """End a session. Only the first reason is stored."""
        if session.ended is not None:
            return
        await self._store.update(Session, session.id, ended=reason, detail=detail, seen=time.time())
        self._activity.forget(session.id)
        self.wake()
        await self._cleanup.release_versions(session)

    async def run(self) -> None:
        """Forever: end silent sessions, delete expired checkpoints, clean up, prune old results."""
        pruned = time.time()
        while True:
            self._wake.clear()
            for checkpoint in await self._checkpoints.expire():
                self._audit_log.checkpoint_changed(checkpoint, "checkpoint_expired", "tinsmith")
            now = time.time()
            for session in self._store.all(Session):
                if session.ended is None and self.last_seen(session) + self._timeout_s <= now:
                    await self.end(session, "silence")
                    await self._cleanup.cancel_requests(session)
            await self._cleanup.run()
            if pruned + PRUNE_S <= now:
                pruned = now
                await self._prune(now)
            await self._sleep(min(pruned + PRUNE_S, now + CLEANUP_S))

    async def _prune(self, now: float) -> None:
        """Remove what has been over for long."""
        await prune(self._store, self._retention, now)
        for session in await remove_ended(self._store, self._retention, now):
            if self._by_idempotency.get((session.owner, session.idempotency_key or "")) == session.id:
                del self._by_idempotency[session.owner, session.idempotency_key or ""]

    async def store_heartbeats(self) -> None:
        """Forever: store when sessions were last active."""
        while True:
            await asyncio.sleep(SEEN_WRITE_S)
            for session in self._store.all(Session):
                seen = self.last_seen(session)
                if session.ended is None and seen > session.seen:
                    await self._store.update(Session, session.id, seen=seen)

    def wake(self) -> None:
        """Run the loop now: something may end sooner than the loop expects."""
        self._wake.set()

    async def _sleep(self, until: float) -> None:
        """Sleep until the next session or checkpoint ends, `until` at the latest."""
        ends = [
            self.last_seen(session) + self._timeout_s for session in self._store.all(Session) if session.ended is None
        ]
        expiry = self._checkpoints.next_expiry()
        end = min([until, *ends, until if expiry is None else expiry])
        with suppress(TimeoutError):
            async with asyncio.timeout(max(end - time.time(), 0.01)):  # wait_for may lose a cancellation in Python 3.11
                await self._wake.wait()

    def _open_sessions(self) -> Iterator[Session]:
        sessions = (self._store.find(Session, session_id) for session_id in self._activity.ids)
        return (session for session in sessions if session is not None and session.ended is None)

    def last_seen(self, session: Session) -> float:
        """When the session's client last sent anything."""
        return self._activity.last_seen(session)
