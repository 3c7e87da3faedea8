"""State of the processes of a base model, for `tinsmith status`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """One process."""

    name: str
    """Of its slot."""
    role: Literal["trainer", "sampler"]
    machine: str
    host: str
    gpus: tuple[str, ...]
    pid: int
    """0 while it does not run."""
    generation: int
    """Number of its start."""
    is_up: bool
    running: int | None = None
    """Sampling requests that it runs; None for a trainer."""
    cache_tokens: int | None = None
    """Tokens that they reserve in its KV cache."""
    versions: int | None = None
    """Adapter versions that it has loaded."""
