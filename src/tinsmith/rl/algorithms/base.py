"""What an algorithm is: groups in, an advantage for each token out, and the loss that takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tinsmith.rl.policy import Loss
from tinsmith.rl.types import Group


class Algorithm(Protocol):
    """It never touches the server: what it wants done is in `loss`."""

    @property
    def loss(self) -> Loss:
        """The loss that the trainer computes."""
        ...

    @property
    def merge(self) -> bool:
        """Whether equal replies of a group may share a row with their advantages summed."""
        ...

    async def score(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """advantages[p][g] is float32 over the policy's tokens of a rollout; an empty list drops the group."""
        ...
