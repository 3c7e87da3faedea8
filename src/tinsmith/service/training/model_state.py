"""The worker's in-memory state of its models, and their restoration in a new engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tinsmith.engine.interface import Engine
from tinsmith.errors import EngineDied, EngineError, Gone, TinsmithError
from tinsmith.service.engines.host import MAX_DEATH_POINTS, MAX_ENGINE_DEATHS, death_points
from tinsmith.service.storage.records import Model
from tinsmith.service.storage.store import FinishedRequest, Store
from tinsmith.service.training.background_writes import BackgroundWriter
from tinsmith.service.training.journal import Journal

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ModelState:
    """Sequence numbers of a model's requests, and whether the running engine has the model."""

    accepted_seq: int = -1
    """Highest seq_id that was accepted."""
    started_seq: int = -1
    """Highest seq_id that an engine has started."""
    updated_seq: int = 0
    """seq_id of the last optim_step or load."""
    uncaptured_steps: int = 0
    """Optimizer steps since the last capture."""
    load_finished: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the running engine has the model, or cannot have it."""
    error: TinsmithError | None = None
    """Why the running engine cannot have the model."""
    used: float = 0.0
    """When requests of it last started, by the monotonic clock."""
    is_passing: bool = False
    """Whether the engine computes passes of the model: a call that is made now takes effect after them."""
    next_step: asyncio.Future[FinishedRequest | None] | None = None
    """Result of the optim_step that the engine was given during these passes, which store it with theirs; None if it
    fails."""
    restore_deaths: int = 0
    """Points of consecutive engine deaths while the model was being restored."""

    def reset(self) -> None:
        """Prepare for a new engine. A model whose restoration killed too many engines stays failed."""
        if self.restore_deaths < MAX_DEATH_POINTS:
            self.load_finished.clear()
            self.error = None

    @contextmanager
    def performing(self) -> Iterator[asyncio.Future[FinishedRequest | None]]:
        """Around an operation on the engine, whose result the caller sets if it succeeds. Passes of the model that the
        engine computes wait for it; what begins beside them is an optim_step."""
        result: asyncio.Future[FinishedRequest | None] = asyncio.get_running_loop().create_future()
        if self.is_passing:
            self.next_step = result
        try:
            yield result
        finally:
            if not result.done():
                result.set_result(None)

    def record_engine_death(self, model_id: str, death: EngineDied) -> None:
        """Count an engine that died while the model was being restored."""
        self.restore_deaths += death_points(death)
        if self.restore_deaths >= MAX_DEATH_POINTS:
            self.error = EngineError(
                f"Model {model_id} cannot be restored: {MAX_ENGINE_DEATHS} engines died while replaying its requests.",
                "Load its last checkpoint into a new model; the next start of the server restores it again.",
            )
            self.load_finished.set()


class ModelRestorer:
    """Restores the models of one engine."""

    def __init__(self, store: Store, journal: Journal, writer: BackgroundWriter) -> None:
        self._store, self._journal, self._writer = store, journal, writer

    async def restore(self, model: Model | None, state: ModelState, engine: Engine) -> None:
        """Bring a live model into the engine, unless the engine has it. If that fails, `state` says why.

        Raises EngineDied.
        """
        if model is None or model.state != "live" or state.load_finished.is_set():
            return
        if model.id in self._store.shadows:
            state.error = Gone(f"Shadow {model.id} ended with the engine that had it.", "Make another.")
        else:
            await self._replay(model, state, engine)
        state.load_finished.set()

    async def _replay(self, model: Model, state: ModelState, engine: Engine) -> None:
        try:
            restored = await self._journal.restore(model, engine)
        except EngineDied as death:
            state.record_engine_death(model.id, death)
            raise
        except TinsmithError as error:
            log.exception("Model %s cannot be restored.", model.id)
            state.error = EngineError(f"Model {model.id} cannot be restored: {error}")
        else:
            state.updated_seq, state.uncaptured_steps = restored.updated_seq, restored.uncaptured_steps
            state.restore_deaths = 0
            for version in restored.unwritten_versions:
                self._writer.schedule(version)
