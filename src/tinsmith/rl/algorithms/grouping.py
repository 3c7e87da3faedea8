"""Comparison groups: which trajectories of a step an advantage compares with each other.

By default these are the trajectories of one role in all rollouts of a task: solvers are compared with solvers, judges
with judges. A trajectory whose siblings all failed has nothing to be compared with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import numpy as np

from tinsmith.rl.algorithms.advantages.base import Advantage, Trace, traces_of_turns
from tinsmith.rl.types import Group, Trajectory

Grouping = Literal["role", "turn", "rollout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonGroup:
    """Trajectories that are compared with each other.

    Example: ComparisonGroup(role="judge", trajectories=(first, second))
    """

    role: str
    """Role of the trajectories; of a group of all roles, that of the first."""
    trajectories: tuple[Trajectory, ...]


def comparison_groups(groups: Sequence[Group], grouping: Grouping) -> list[ComparisonGroup]:
    """The comparison groups of a step, in order of its groups."""
    if grouping == "rollout":
        return [
            ComparisonGroup(role=rollout.trajectories[0].role, trajectories=rollout.trajectories)
            for group in groups
            for rollout in group.rollouts
            if not rollout.error and rollout.trajectories
        ]
    return [
        ComparisonGroup(role=role, trajectories=group.trajectories(role)) for group in groups for role in group.roles
    ]


def compare(
    advantage: Advantage, traces_PG: Sequence[Sequence[Trace]], grouping: Grouping, random: np.random.Generator
) -> list[list[np.ndarray]]:
    """The advantages of one role's groups, float64 [T] for each trace.

    With grouping `turn`, the first turns of a group are compared with each other, then the second ones, and so on; the
    values of a trace are those of its turns in order.
    """
    if grouping != "turn":
        return advantage.compute(traces_PG, random)
    turns_PG = [[traces_of_turns(trace) for trace in traces_G] for traces_G in traces_PG]
    places = [
        (group, [(member, turn) for member, turn in enumerate(column) if turn is not None])
        for group, turns_G in enumerate(turns_PG)
        for column in zip_longest(*turns_G)
    ]
    computed = advantage.compute([[turn for _, turn in members] for _, members in places], random)
    values: list[list[list[np.ndarray]]] = [[[] for _ in traces_G] for traces_G in traces_PG]
    for (group, members), values_G in zip(places, computed, strict=True):
        for (member, turn), value in zip(members, values_G or [np.zeros(0)] * len(members), strict=True):
            values[group][member].append(value if len(value) else turn.full(0.0))
    return [[np.concatenate([np.zeros(0), *turns]) for turns in turns_G] for turns_G in values]


def lone(group: ComparisonGroup, advantage: Advantage, group_size: int) -> bool:
    """Whether a method that compares has a single trajectory, though the run plans several rollouts of a task."""
    return advantage.compares and group_size > 1 and len(group.trajectories) < 2


AdvantageOfRole = Callable[[str], Advantage]
"""The advantage of a role."""


def advantages_by_role(
    groups: Sequence[ComparisonGroup],
    traces_PG: Sequence[Sequence[Trace]],
    advantage_of: AdvantageOfRole,
    grouping: Grouping,
    group_size: int,
    random: np.random.Generator,
) -> list[list[np.ndarray]]:
    """The advantages of all comparison groups; an empty list drops its group.

    The groups of each role are computed together, apart from those of other roles: so statistics over the step are
    those of one role.
    """
    result: list[list[np.ndarray]] = [[] for _ in groups]
    numbers_by_role: dict[str, list[int]] = defaultdict(list)
    for number, group in enumerate(groups):
        numbers_by_role["" if grouping == "rollout" else group.role].append(number)
    for role, numbers in numbers_by_role.items():
        advantage = advantage_of(role)
        compared = [number for number in numbers if not lone(groups[number], advantage, group_size)]
        values_PG = compare(advantage, [traces_PG[number] for number in compared], grouping, random)
        for number, values_G in zip(compared, values_PG, strict=True):
            result[number] = values_G
    return result
