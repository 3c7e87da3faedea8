"""What sessions leave behind when they end, and how it is cleared away.

Whatever a session that has ended still holds is found in the store, anew each time. So it does not matter when it came
(a save that was queued, a model that was being made) or what kept it so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from tinsmith.errors import EngineDied
from tinsmith.service.checkpoints import Checkpoints
from tinsmith.service.futures import Futures
from tinsmith.service.journal import Journal
from tinsmith.service.records import Checkpoint, CustomLoss, Model, Sampler, Session
from tinsmith.service.store import Store
from tinsmith.service.worker import Worker


class Remains:
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

    async def clear(self) -> None:
        """Models leave once all that they promised is done; unnamed versions, losses and untold samples go."""
        await self._end_models()
        if losses := [one for one in self._store.all(CustomLoss) if self._is_over(one.session_id)]:
            await self._store.remove(*losses)
        self._futures.clear(self._has_ended)
        for one in self._store.all(Checkpoint):
            if one.deleted or (one.kind == "ephemeral" and self._is_orphan(one)):
                await self._release(one.id, one.base_model)

    async def release(self, session: Session) -> None:
        """The versions that its sampling sessions used leave the engine, unless others use them."""
        for sampler in self._store.all(Sampler):
            if sampler.session_id == session.id and sampler.version is not None:
                await self._release(sampler.version, sampler.base_model)

    async def _end_models(self) -> None:
        left = [one for one in self._store.all(Model) if one.state != "ended" and self._is_over(one.session_id)]
        for model in (one for one in left if one.base_model in self._workers):
            if self._leaving.get(model.id) is not model:
                self._workers[model.base_model].drop(model)
        self._leaving = {model.id: model for model in left}
        unserved = [one for one in left if one.base_model not in self._workers]
        if unserved:
            highest = await self._store.highest()
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
        sampler = self._store.find(Sampler, sampler_id)
        return sampler is None or self._is_over(sampler.session_id)
