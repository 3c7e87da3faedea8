"""Eviction of models from one engine: captured by the journal, dropped, and restored with their next request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tinsmith.engine.base import LoraSpec
from tinsmith.errors import EngineDied, TinsmithError
from tinsmith.service.budgets.activity import SILENT_S, SessionActivity
from tinsmith.service.budgets.models import (
    MemoryUse,
    ModelUse,
    check_new_model,
    idle_models,
    memory_limit,
    model_bytes,
    models_to_evict,
)
from tinsmith.service.engines.host import EngineHost
from tinsmith.service.storage.records import Model
from tinsmith.service.storage.store import Store
from tinsmith.service.training.background_writes import BackgroundWriter
from tinsmith.service.training.journal import Journal
from tinsmith.service.training.model_state import ModelState
from tinsmith.service.training.queue import RequestQueue

LIVING = ("pending", "live")
"""States of models that requests can be sent to."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBudget:
    """Settings of the models of one engine, and who is there to use them."""

    activity: SessionActivity
    memory: int | None = None
    """Bytes; None for half of what is free when the engine is loaded."""
    idle_s: float = 900.0
    """Seconds without a request after which a model is evicted."""


class ModelEvictor:
    """The models of one engine. `states` and `queue` are its worker's."""

    def __init__(
        self,
        host: EngineHost,
        store: Store,
        journal: Journal,
        writer: BackgroundWriter,
        budget: ModelBudget,
        states: Mapping[str, ModelState],
        queue: RequestQueue,
    ) -> None:
        self._host, self._store, self._journal, self._writer = host, store, journal, writer
        self._budget, self._states, self._queue = budget, states, queue
        self._lock = asyncio.Lock()
        """Held while room is made, so that models get it in the order in which they ask."""
        self._held: Counter[str] = Counter()
        """Models with running requests."""
        self._released = asyncio.Event()

    def use(self) -> MemoryUse:
        """Memory that the engine's models take."""
        models = self.models()
        return MemoryUse(
            used_bytes=sum(model.size_bytes for model in models if model.is_loaded),
            limit_bytes=self._limit or 0,
            evicted=sum(not model.is_loaded for model in models),
        )

    def check_new(self, lora: LoraSpec) -> None:
        """Raise Forbidden or Busy if a new model does not fit. Before the first start, every model is accepted."""
        if self._host.is_up:
            check_new_model(self.models(), self._size(lora), self._limit)

    @asynccontextmanager
    async def holding(self, model_ids: Collection[str], *, restores: bool = True) -> AsyncIterator[None]:
        """Evict none of the models for the duration of the block, which restores them in the engine.

        Others are evicted to make room for them, unless the block does not restore them. Waits while models with
        running requests take the room. Raises EngineDied.
        """
        async with self._lock:
            for model_id in model_ids:
                self._states[model_id].used = time.monotonic()
            if restores and not all(self._is_resident(model_id) for model_id in model_ids):
                await self._make_room(model_ids)
            self._held.update(model_ids)
        try:
            yield
        finally:
            for model_id in model_ids:
                self._held[model_id] -= 1
                if not self._held[model_id]:
                    del self._held[model_id]
            self._released.set()

    async def evict_idle(self) -> None:
        """Evict the models that nobody uses."""
        if not self._host.is_up:
            return
        for model_id in idle_models(self.models(), self._budget.idle_s):
            async with self._lock:
                model = self._store.find(Model, model_id)
                if model is None or not idle_models([self._use_of(model)], self._budget.idle_s):
                    continue  # it was used while the lock was awaited
                if not self._writer.has_unwritten_versions(model):
                    await self._evict(model_id)

    async def _make_room(self, model_ids: Collection[str]) -> None:
        """Evict others until the models fit; wait for those that are held. Without any, the models always fit."""
        while True:
            models = self.models()
            others = [use for use in models if use.id not in model_ids]
            size = sum(use.size_bytes for use in models if use.id in model_ids)
            held = [use.id for use in others if use.id in self._held]
            evicted = models_to_evict(others, size, self._limit, held)
            if evicted is not None or not held:
                break
            self._released.clear()
            await self._released.wait()
        for model_id in [use.id for use in others] if evicted is None else evicted:
            await self._evict(model_id)

    async def _evict(self, model_id: str) -> None:
        """Capture a model and drop it from the engine. If that fails, it stays. Raises EngineDied.

        While the disk is low, it is not captured: all of its requests since the last capture are replayed.
        """
        model, state = self._store.find(Model, model_id), self._states.get(model_id)
        if model is None or state is None or not _is_loaded(model, state):
            return
        try:
            await self._writer.flush(model)  # a replay must not make versions again that are sampled from
            if state.uncaptured_steps and self._journal.has_room:
                await self._journal.capture(model, state.updated_seq, self._host.engine)
                state.uncaptured_steps = 0
        except EngineDied:
            raise
        except (TinsmithError, OSError) as error:
            log.warning("Model %s stays in the engine, since it cannot be captured: %s", model_id, error)
            return
        await self._host.engine.drop(model_id)
        state.load_finished.clear()
        log.info("Model %s was evicted from the engine; its next request restores it.", model_id)

    @property
    def _limit(self) -> int | None:
        return memory_limit(self._budget.memory, self._host.engine.card) if self._host.is_up else self._budget.memory

    def _size(self, lora: LoraSpec) -> int:
        return model_bytes(lora, self._host.engine.card) if self._host.is_up else 0

    def _is_resident(self, model_id: str) -> bool:
        """Whether the engine has the model, or is about to have it."""
        if model_id in self._held or model_id in self._store.shadows:
            return True
        model, state = self._store.find(Model, model_id), self._states.get(model_id)
        return model is not None and state is not None and _is_loaded(model, state)

    def models(self) -> list[ModelUse]:
        """The engine's models, loaded or not, without shadows."""
        return [self._use_of(model) for model in self._live_models()]

    def _live_models(self) -> Iterable[Model]:
        models = (self._store.find(Model, model_id) for model_id in self._states)
        shadows = self._store.shadows
        return (each for each in models if each is not None and each.state in LIVING and each.id not in shadows)

    def _use_of(self, model: Model) -> ModelUse:
        state = self._states.get(model.id) or ModelState()
        return ModelUse(
            id=model.id,
            size_bytes=self._size(model.lora),
            unused_s=time.monotonic() - state.used,
            is_loaded=self._is_resident(model.id),
            is_queued=self._queue.needs(model.id),
            is_silent=self._budget.activity.is_silent(model.session_id, SILENT_S),
        )


def _is_loaded(model: Model, state: ModelState) -> bool:
    return model.state == "live" and state.load_finished.is_set() and state.error is None
