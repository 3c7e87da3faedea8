"""The worker's in-memory state of one model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tinsmith.errors import EngineError, TinsmithError
from tinsmith.service.engines.host import MAX_ENGINE_DEATHS


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
    restore_deaths: int = 0
    """Consecutive engine deaths while the model was being restored."""

    def reset(self) -> None:
        """Prepare for a new engine. A model whose restoration killed too many engines stays failed."""
        if self.restore_deaths < MAX_ENGINE_DEATHS:
            self.load_finished.clear()
            self.error = None

    def record_engine_death(self, model_id: str) -> None:
        """Count an engine that died while the model was being restored."""
        self.restore_deaths += 1
        if self.restore_deaths >= MAX_ENGINE_DEATHS:
            self.error = EngineError(
                f"Model {model_id} cannot be restored: {MAX_ENGINE_DEATHS} engines died while replaying its requests.",
                "Load its last checkpoint into a new model; the next start of the server restores it again.",
            )
            self.load_finished.set()
