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
from tinsmith.rl.types import Group, Task, Trajectory

Grouping = Literal["role", "turn", "rollout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonGroup:
    """Trajectories that are compared with each other.

    Example: ComparisonGroup(role="judge", trajectories=(first, second))
    """

    role: str
    """Role of the trajectories; of a group of all roles, that of the first."""
    trajectories: tuple[Trajectory, ...]
    task: Task | None = None
    """The task that the trajectories worked on."""


def comparison_groups(groups: Sequence[Group], grouping: Grouping) -> list[ComparisonGroup]:
    """The comparison groups of a step, in order of its groups."""
    if grouping == "rollout":
        return [
            ComparisonGroup(role=rollout.trajectories[0].role, trajectories=rollout.trajectories, task=group.task)
            for group in groups
            for rollout in group.rollouts
            if not rollout.error and rollout.trajectories
        ]
    return [
        ComparisonGroup(role=role, trajectories=group.trajectories(role), task=group.task)
        for group in groups
        for role in group.roles
    ]


def compare_turns(
    advantage: Advantage, traces_PG: Sequence[Sequence[Trace]], fewest: int, random: np.random.Generator
) -> list[list[np.ndarray]]:
    """Advantages that compare the first turns of a group, the second ones, and so on, float64 [T] for each trace.

    Turns with fewer than `fewest` turns to compare, themselves included, have advantage 0.
    """
    turns_PG = [[traces_of_turns(trace) for trace in traces_G] for traces_G in traces_PG]
    values = [[[turn.full(0.0) for turn in turns] for turns in turns_G] for turns_G in turns_PG]
    places = [
        (group, number, [member for member, turn in enumerate(column) if turn is not None])
        for group, turns_G in enumerate(turns_PG)
        for number, column in enumerate(zip_longest(*turns_G))
    ]
    places = [place for place in places if len(place[2]) >= fewest]
    computed = advantage.compute(
        [[turns_PG[group][member][number] for member in members] for group, number, members in places], random
    )
    for (group, number, members), values_G in zip(places, computed, strict=True):
        for member, value in zip(members, values_G, strict=False):
            values[group][member][number] = value if len(value) else values[group][member][number]
    return [[np.concatenate([np.zeros(0), *turns]) for turns in turns_G] for turns_G in values]


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
    """The advantages of all comparison groups, float64 [T] for each trace; an empty list drops its group.

    The groups of each role are computed together, apart from those of other roles: so statistics over the step are
    those of one role. If the run plans several rollouts of a task, a method that compares drops what is left alone.
    """
    result: list[list[np.ndarray]] = [[] for _ in groups]
    numbers_by_role: dict[str, list[int]] = defaultdict(list)
    for number, group in enumerate(groups):
        numbers_by_role["" if grouping == "rollout" else group.role].append(number)
    for role, numbers in numbers_by_role.items():
        advantage = advantage_of(role)
        fewest = 2 if advantage.compares and group_size > 1 else 1
        compared = [number for number in numbers if len(traces_PG[number]) >= fewest]
        traces = [traces_PG[number] for number in compared]
        if grouping == "turn":
            values_PG = compare_turns(advantage, traces, fewest, random)
        else:
            values_PG = advantage.compute(traces, random)
        for number, values_G in zip(compared, values_PG, strict=True):
            result[number] = values_G
    return result
