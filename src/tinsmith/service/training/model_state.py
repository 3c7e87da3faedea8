"""One model's place in its engine's queue, as the worker keeps it between batches."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tinsmith.errors import EngineError, TinsmithError
from tinsmith.service.engines.host import DEATHS


@dataclass(slots=True)
class Line:
    """What was accepted, what has begun, and since when nothing was captured."""

    accepted: int = -1
    begun: int = -1
    updated: int = 0
    """seq_id of the last step or load."""
    steps: int = 0
    """Steps since the last capture."""
    warm: asyncio.Event = field(default_factory=asyncio.Event)
    """The living engine has the model, or never will."""
    broken: TinsmithError | None = None
    """Why the living engine cannot have the model."""
    deaths: int = 0
    """Engines that died, one after another, while the model was brought back."""

    def anew(self) -> None:
        """An engine was started that has no model yet; what has killed too many is not brought back there either."""
        if self.deaths < DEATHS:
            self.warm.clear()
            self.broken = None

    def killed(self, model_id: str) -> None:
        """An engine died while the model was brought back."""
        self.deaths += 1
        if self.deaths >= DEATHS:
            what = f"Model {model_id} cannot be brought back: {DEATHS} engines died while they replayed its requests."
            self.broken = EngineError(
                what, "Load its last checkpoint into another; the server's next start tries again."
            )
            self.warm.set()
