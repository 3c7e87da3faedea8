"""GRPO: a reply is worth as much as it is better than the other replies to the same task.

The advantage is reward - mean of the group, the same for each token of a reply. What is left out by default is the
division by the group's deviation, which favors tasks that are nearly always or nearly never solved. Groups whose
rewards are all equal have no gradient and are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from tinsmith.rl.policy import Loss
from tinsmith.rl.samples import spoken
from tinsmith.rl.types import Group
from tinsmith.settings import Settings

_CLIPS = ("clip_low_threshold", "clip_high_threshold")
_LOSS_KEYS: dict[str, tuple[str, ...]] = {"importance_sampling": (), "ppo": _CLIPS, "cispo": _CLIPS, "dro": ("beta",)}
_DEVIATION_FLOOR = 1e-6


class GrpoConfig(Settings):
    """Group-relative advantages and a policy-gradient loss."""

    type: Literal["grpo"] = "grpo"
    normalize: bool = False
    """Divide advantages by the standard deviation of the group's rewards."""
    drop_constant: bool = True
    """Drop groups whose rewards are all equal; off, they are trained on with advantage 0."""
    merge_replies: bool = True
    """Train on equal replies of a group once, with their advantages summed; exact, and never done for dro."""
    loss_fn: Literal["importance_sampling", "ppo", "cispo", "dro"] = "importance_sampling"
    """The server's loss."""
    loss_config: dict[str, float] = Field(default_factory=dict)
    """Its options: clip_low_threshold, clip_high_threshold (ratios, as 0.8, 1.2) for ppo and cispo; beta for dro."""

    @model_validator(mode="after")
    def _keys_are_the_losses(self) -> GrpoConfig:
        known = _LOSS_KEYS[self.loss_fn]
        wrong = sorted(set(self.loss_config) - set(known))
        if wrong:
            raise ValueError(f"{self.loss_fn} has no option {', '.join(wrong)}; it has: {', '.join(known) or 'none'}")
        return self


class Grpo:
    """Pure arithmetic on rewards."""

    def __init__(self, config: GrpoConfig) -> None:
        self._config = config

    @property
    def loss(self) -> Loss:
        """As configured."""
        return Loss(name=self._config.loss_fn, config=self._config.loss_config)

    @property
    def merge(self) -> bool:
        """dro's quadratic term counts every reply, so its rows stay apart."""
        return self._config.merge_replies and self._config.loss_fn != "dro"

    async def score(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """A failed rollout has an empty array and no part in the mean."""
        return [self._of_group(group) for group in groups]

    def _of_group(self, group: Group) -> list[np.ndarray]:
        rewards_G = np.array(group.rewards)
        if not len(rewards_G) or (group.constant and self._config.drop_constant):
            return []
        scale = float(rewards_G.std()) + _DEVIATION_FLOOR if self._config.normalize else 1.0
        mean = float(rewards_G.mean())
        return [
            np.full(0 if rollout.error else spoken(rollout), (rollout.reward - mean) / scale, np.float32)
            for rollout in group.rollouts
        ]
