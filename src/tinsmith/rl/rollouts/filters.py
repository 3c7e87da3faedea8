"""Which rollouts and groups of a batch are learned from, before any algorithm sees them.

Each filter is a settings class whose `of` takes a group and gives what is left of it, or None. What filters leave out
is logged and counted all the same, and tells the order of tasks how the policy does. Leaves out sampling others in
their place (`rollouts.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from tinsmith.rl.types import Group, Rollout
from tinsmith.settings import Settings


class _Bounds(Settings):
    """Two bounds, of which one may be missing."""

    low: float | None = None
    """Least, itself allowed; null is no bound."""
    high: float | None = None
    """Most, itself allowed; null is no bound."""

    @model_validator(mode="after")
    def _bound_something(self) -> _Bounds:
        if self.low is None and self.high is None:
            raise ValueError("give low, high or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")
        return self

    def within(self, value: float) -> bool:
        """Whether it is inside of both."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


class RewardBounds(_Bounds):
    """Leave out rollouts whose reward is outside of bounds."""

    type: Literal["reward"] = "reward"

    def of(self, group: Group) -> Group | None:
        """The others."""
        return _kept(group, lambda rollout: self.within(rollout.reward))


class ValidReward(Settings):
    """Leave out rollouts whose reward is no number, or infinite. In a run they have failed already."""

    type: Literal["valid_reward"] = "valid_reward"

    def of(self, group: Group) -> Group | None:
        """The others."""
        return _kept(group, lambda rollout: math.isfinite(rollout.reward))


class GroupMean(_Bounds):
    """Leave out groups whose mean reward is outside of bounds: too easy, or too hard."""

    type: Literal["group_mean"] = "group_mean"

    def of(self, group: Group) -> Group | None:
        """The group, or nothing of it."""
        return group if group.rewards and self.within(float(np.mean(group.rewards))) else None


class RewardStd(Settings):
    """Leave out groups whose rewards differ too little to compare (dynamic sampling, DAPO, arXiv 2503.14476)."""

    type: Literal["reward_std"] = "reward_std"
    threshold: float = Field(default=0.0, ge=0)
    """A group is left out where the standard deviation of its rewards is no more than this."""

    def of(self, group: Group) -> Group | None:
        """The group, or nothing of it."""
        return group if group.rewards and float(np.std(group.rewards)) > self.threshold else None


class TruncatedReplies(Settings):
    """Do not learn from replies that were cut at max_tokens; their rewards still count in the comparison."""

    type: Literal["cut"] = "cut"
    drop: bool = False
    """Leave them out of the comparison too."""

    def of(self, group: Group) -> Group | None:
        """The others; in place of each cut rollout one of its reward that says nothing."""
        if self.drop:
            return _kept(group, lambda rollout: not _cut(rollout))
        emptied = (replace(one, turns=()) if _cut(one) and not one.error else one for one in group.rollouts)
        return replace(group, rollouts=tuple(emptied))


FilterConfig = Annotated[
    RewardBounds | ValidReward | GroupMean | RewardStd | TruncatedReplies, Field(discriminator="type")
]


def apply_filters(filters: Sequence[FilterConfig], groups: Sequence[Group]) -> tuple[Group, ...]:
    """What is left of `groups` after each filter in turn."""
    left: list[Group] = []
    for group in groups:
        one: Group | None = group
        for each in filters:
            one = each.of(one) if one is not None else None
        if one is not None:
            left.append(one)
    return tuple(left)


def _kept(group: Group, keep: Callable[[Rollout], bool]) -> Group | None:
    """A group of the rollouts that may stay; failed ones stay failed."""
    rollouts = tuple(rollout for rollout in group.rollouts if rollout.error or keep(rollout))
    return replace(group, rollouts=rollouts) if any(not rollout.error for rollout in rollouts) else None


def _cut(rollout: Rollout) -> bool:
    return bool(rollout.turns) and rollout.turns[-1].stop == "length"
