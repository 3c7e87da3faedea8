"""What an algorithm is: a step's groups in, rows and one loss over them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tinsmith.rl.policy import Update, Updated
from tinsmith.rl.samples import Sample
from tinsmith.rl.types import Group


class Algorithm(Protocol):
    """It changes no weights: what it wants learned is in the Update."""

    @property
    def where(self) -> str:
        """Who computes the loss, for people."""
        ...

    async def score(self, step: int, groups: Sequence[Group], experts: Sequence[Sample] = ()) -> Update:
        """What to learn from groups, and from rows of others beside them; no rows means nothing to learn."""
        ...

    def learned(self, update: Update, updated: Updated) -> dict[str, float]:
        """Told of the update's answer; returns numbers of its own."""
        ...

    @property
    def state(self) -> Mapping[str, float]:
        """What a run that goes on must know."""
        ...

    def restore(self, state: Mapping[str, float]) -> None:
        """As it was."""
        ...
