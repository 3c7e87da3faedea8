"""Filters: which rollouts and groups of a batch are trained on.

Each filter is a settings class; its `of` returns the group without the dropped rollouts, or None to drop the group.
Dropped rollouts are still logged, counted in metrics and passed to the task order. `sampler.py` samples replacements.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator
from typing_extensions import override

from tinsmith.rl.plugins import CustomPart, Kind
from tinsmith.rl.types import Group, Rollout, Termination, Trajectory
from tinsmith.settings import Settings


class _Bounds(Settings):
    """Inclusive bounds of a value; one of them may be missing."""

    low: float | None = None
    """Smallest value to keep; null: no lower bound."""
    high: float | None = None
    """Largest value to keep; null: no upper bound."""

    @model_validator(mode="after")
    def _bound_something(self) -> _Bounds:
        if self.low is None and self.high is None:
            raise ValueError("set low, high or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")
        return self

    def within(self, value: float) -> bool:
        """Whether `value` is within the bounds."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


class RewardBounds(_Bounds):
    """Drop rollouts whose reward is out of bounds."""

    type: Literal["reward"] = "reward"

    def of(self, group: Group) -> Group | None:
        """The group without the dropped rollouts; None if no successful rollout is left."""
        return _select(group, lambda rollout: self.within(rollout.reward))


class ValidReward(Settings):
    """Drop rollouts whose reward is not finite. In a run, such rollouts have already failed."""

    type: Literal["valid_reward"] = "valid_reward"

    def of(self, group: Group) -> Group | None:
        """The group without the dropped rollouts; None if no successful rollout is left."""
        return _select(group, lambda rollout: math.isfinite(rollout.reward))


class GroupMean(_Bounds):
    """Drop groups whose mean reward is out of bounds: too easy or too hard."""

    type: Literal["group_mean"] = "group_mean"

    def of(self, group: Group) -> Group | None:
        """The group, or None if it is dropped."""
        return group if group.rewards and self.within(float(np.mean(group.rewards))) else None


class RewardStd(Settings):
    """Drop groups whose rewards are nearly equal (dynamic sampling, DAPO, arXiv 2503.14476), role by role."""

    type: Literal["reward_std"] = "reward_std"
    threshold: float = Field(default=0.0, ge=0)
    """Drop the trajectories of a role if the standard deviation of their rewards in the group is at most this, and the
    group if none is left."""

    def of(self, group: Group) -> Group | None:
        """The group without the dropped trajectories; None if nothing is left to train on."""
        return _select_roles(group, self._varies)

    def _varies(self, trajectories: Sequence[Trajectory]) -> bool:
        return float(np.std([each.reward for each in trajectories])) > self.threshold


class GroupSize(Settings):
    """Drop roles that have too few trajectories in a group, such as those whose siblings failed or were dropped."""

    type: Literal["group_size"] = "group_size"
    least: int = Field(default=2, ge=1)
    """Drop the trajectories of a role if the group has fewer than this, and the group if none is left."""

    def of(self, group: Group) -> Group | None:
        """The group without the dropped trajectories; None if nothing is left to train on."""
        return _select_roles(group, lambda trajectories: len(trajectories) >= self.least)


class TerminationReason(Settings):
    """Drop rollouts that ended for one of these reasons, with their rewards."""

    type: Literal["termination"] = "termination"
    reasons: tuple[Termination, ...] = Field(min_length=1)
    """Reasons to drop: `max_prompt`, `max_response` (the last reply was truncated), `max_turns`, `timeout`, `error`,
    or `done`, of a rollout that reached no limit."""

    def of(self, group: Group) -> Group | None:
        """The group without the dropped rollouts; None if no successful rollout is left."""
        return _select(group, lambda rollout: rollout.termination not in self.reasons)


class TruncatedReplies(Settings):
    """Do not train on replies truncated at max_tokens; their rewards still count for the advantages of the group."""

    type: Literal["cut"] = "cut"
    drop: bool = False
    """Drop the trajectories and their rewards."""

    def of(self, group: Group) -> Group | None:
        """The group with the turns of truncated trajectories removed, or with `drop` without these trajectories."""
        if self.drop:
            untruncated = _with_trajectories(group, lambda each: () if each.truncated else (each,))
            return _select(untruncated, lambda rollout: bool(rollout.trajectories))
        return _with_trajectories(group, lambda each: (replace(each, turns=()) if each.truncated else each,))


class CustomFilter(CustomPart):
    """User code: a function of a group that keeps it (true), drops it (false), or returns the group to train on.

    Example: def varied(group): return len({rollout.text for rollout in group.rollouts}) > 1
    """

    kind: ClassVar[Kind] = "filter"
    type: Literal["custom"] = "custom"

    @override
    def check_code(self) -> None:
        _ = self._function

    @cached_property
    def _function(self) -> Callable[..., Any]:
        return self.function_of("group")[0]

    def of(self, group: Group) -> Group | None:
        """The group to train on; None if it is dropped. Raises ConfigError for anything else."""
        returned = self._function(group)
        if isinstance(returned, Group):
            return returned if returned.rewards else None
        if not isinstance(returned, bool | np.bool):
            raise self.fault(
                f"returned {returned!r:.80}", "Return true to keep the group, false to drop it, or a Group."
            )
        return group if returned else None


FilterConfig = Annotated[
    RewardBounds
    | ValidReward
    | GroupMean
    | RewardStd
    | GroupSize
    | TerminationReason
    | TruncatedReplies
    | CustomFilter,
    Field(discriminator="type"),
]


class GroupFilters:
    """The filters of a run, applied in order. A group is filtered once: its outcome is kept as long as the group."""

    def __init__(self, filters: Sequence[FilterConfig]) -> None:
        self._filters = tuple(filters)
        self._outcomes: dict[int, tuple[weakref.ref[Group], Group | None]] = {}
        """By the identity of the group: groups have equal values, and their tasks no hash."""

    def remaining(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """The groups that remain after all filters."""
        if not self._filters:
            return tuple(groups)
        return tuple(left for group in groups if (left := self._outcome(group)) is not None)

    def _outcome(self, group: Group) -> Group | None:
        key = id(group)
        if key not in self._outcomes:
            outcome: Group | None = replace(group)  # a copy: the group itself would keep itself alive
            for group_filter in self._filters:
                outcome = group_filter.of(outcome) if outcome is not None else None
            self._outcomes[key] = weakref.ref(group, lambda _: self._outcomes.pop(key)), outcome
        return self._outcomes[key][1]


def _select(group: Group, keep: Callable[[Rollout], bool]) -> Group | None:
    """The group with its failed rollouts and those that `keep` accepts; None if no successful rollout is left."""
    rollouts = tuple(rollout for rollout in group.rollouts if rollout.error or keep(rollout))
    return replace(group, rollouts=rollouts) if any(not rollout.error for rollout in rollouts) else None


def _select_roles(group: Group, keep: Callable[[Sequence[Trajectory]], bool]) -> Group | None:
    """The group without the roles whose trajectories `keep` rejects; None if no role that is trained on is left."""
    trained = {role for role in group.roles if any(each.trained for each in group.trajectories(role))}
    dropped = {role for role in trained if not keep(group.trajectories(role))}
    if dropped == trained:
        return None
    without = _with_trajectories(group, lambda each: () if each.role in dropped else (each,))
    return _select(without, lambda rollout: bool(rollout.trajectories))


def _with_trajectories(group: Group, change: Callable[[Trajectory], tuple[Trajectory, ...]]) -> Group:
    """The group with what `change` makes of each trajectory of the rollouts that did not fail."""
    rollouts = (
        rollout
        if rollout.error
        else replace(rollout, trajectories=tuple(new for each in rollout.trajectories for new in change(each)))
        for rollout in group.rollouts
    )
    return replace(group, rollouts=tuple(rollouts))
