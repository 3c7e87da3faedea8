"""Held-out tasks of a run file as scores: their rewards, and which answers are right."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from tinsmith.rl.evaluation.scores import Attempt, Scores
from tinsmith.rl.record.metrics import is_right
from tinsmith.rl.rewards import Reward
from tinsmith.rl.types import Group, Rollout, Task

_UNREAD = "none"
"""Stands for the answer of a reply in which the rewards read none."""


def judged_sources(models: Iterable[Sequence[Group]], sources: Sequence[str], threshold: float) -> set[str]:
    """The sources in which something says which answers of any model are right: the rollouts, or their rewards, the
    largest of which is `threshold`."""
    by_source: dict[str, list[Group]] = {}
    for groups in models:
        for group, source in zip(groups, sources, strict=True):
            by_source.setdefault(source, []).append(group)
    return {source for source, groups in by_source.items() if _is_judged(groups, threshold)}


def _is_judged(groups: Sequence[Group], threshold: float) -> bool:
    if any(rollout.correct is not None for group in groups for rollout in group.rollouts):
        return True
    return max((reward for group in groups for reward in group.rewards), default=-math.inf) == threshold


def scores_of(
    title: str,
    groups: Sequence[Group],
    sources: Sequence[str],
    threshold: float,
    rewards: Callable[[str], Sequence[Reward]],
    *,
    right: Collection[str],
) -> Scores:
    """The scores of an evaluation: `TITLE right` of the sources `right` (`judged_sources`), and `TITLE reward`.

    `sources` is the name of the source of each group, `rewards` are those of a source, which read answers. A failed
    rollout is not right; a task whose rollouts all failed has no reward.
    """
    made: dict[str, dict[str, list[Attempt]]] = {}
    for source in dict.fromkeys(sources):
        of_source = [group for group, name in zip(groups, sources, strict=True) if name == source]
        name = f"{title}/{source}" if source and source != title else title
        if source in right:
            verdicts = [_right(each, threshold, rewards(source)) for each in of_source]
            ids = [f"{at} {each.task.id}" for at, each in enumerate(of_source)]
            made[f"{name} right"] = _readable(dict(zip(ids, verdicts, strict=True)))
        made[f"{name} reward"] = {
            f"{at} {group.task.id}": [Attempt("", reward) for reward in group.rewards]
            for at, group in enumerate(of_source)
            if group.rewards
        }
    return {name: problems for name, problems in made.items() if problems}


def _right(group: Group, threshold: float, rewards: Sequence[Reward]) -> list[Attempt]:
    return [Attempt(_answer(group.task, each, rewards), float(is_right(each, threshold))) for each in group.rollouts]


def _answer(task: Task, rollout: Rollout, rewards: Sequence[Reward]) -> str:
    return next(filter(None, (reward.read_answer(task, rollout.text) for reward in rewards)), "")


def _readable(problems: Mapping[str, Sequence[Attempt]]) -> dict[str, list[Attempt]]:
    """The attempts, with a name for no answer if answers are read at all."""
    reads = any(each.answer for attempts in problems.values() for each in attempts)
    return {
        name: [Attempt(each.answer or (_UNREAD if reads else ""), each.score) for each in attempts]
        for name, attempts in problems.items()
    }
