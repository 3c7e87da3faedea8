"""One model's place in its engine's queue, as the worker keeps it between batches."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tinsmith.errors import TinsmithError


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
