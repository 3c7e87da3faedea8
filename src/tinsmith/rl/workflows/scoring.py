"""Scoring of rollouts: what the workflow gave, and the rewards of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tinsmith.rl.guards.user_code import contained, describe
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rewards.base import Score, all_correct
from tinsmith.rl.types import POLICY, Rollout, Task, Trajectory

OWN = "workflow"
"""Name of the workflow's own reward among the reward parts."""

NO_REWARD = "reward: neither the workflow nor the run's rewards gave one"


async def scored(
    task: Task, rollout: Rollout, rewards: Rewards, policy: Snapshot, *, without_reward: Sequence[str] = ()
) -> Rollout:
    """Return the rollout with the run's rewards added to those of its trajectories. If a reward raises, it has failed.

    Parts of rewards are recorded by role. A `correct` of the workflow counts more than those of the rewards.
    `without_reward`: roles to which the workflow gave no reward; the rollout has failed if the run's give none either.
    """

    async def score() -> list[tuple[Trajectory, Score]]:
        return [(each, await rewards.score(task, each, policy)) for each in rollout.trajectories]

    scores = await contained(score(), _failure)
    if isinstance(scores, str):
        return rollout.failed(scores)
    role = next((role for role in without_reward if not rewards.groups_score(role)), None)
    if role is not None and rewards.needed and not any(score.parts for _, score in scores):
        return rollout.failed(NO_REWARD if role == POLICY else f"{NO_REWARD} to {role}")
    return _with_scores(rollout, scores)


async def scored_group(
    task: Task, rollouts: Sequence[Rollout], rewards: Rewards, policy: Snapshot, seed: int
) -> tuple[Rollout, ...]:
    """Return the rollouts with the rewards that compare the trajectories of a role in a group. If one raises, all
    rollouts have failed. `seed`: that of the group."""
    scores: list[dict[int, Score]] = [{} for _ in rollouts]
    places = [
        (at, number, each)
        for at, rollout in enumerate(rollouts)
        if not rollout.error
        for number, each in enumerate(rollout.trajectories)
    ]

    async def score_roles() -> str:
        for role in dict.fromkeys(each.role for *_, each in places):
            members = [place for place in places if place[2].role == role]
            of_role = await rewards.score_group(task, [each for *_, each in members], policy, seed)
            for (at, number, _), score in zip(members, of_role, strict=True):
                scores[at][number] = score
        return ""

    if message := await contained(score_roles(), _failure):
        return tuple(each if each.error else each.failed(message) for each in rollouts)
    return tuple(
        rollout
        if rollout.error
        else _with_scores(rollout, [(each, of_rollout[at]) for at, each in enumerate(rollout.trajectories)])
        for rollout, of_rollout in zip(rollouts, scores, strict=True)
    )


def _failure(error: BaseException) -> str:
    return f"reward: {describe(error)}"


def _with_scores(rollout: Rollout, scores: Sequence[tuple[Trajectory, Score]]) -> Rollout:
    """The rollout with the scores of its trajectories added to their rewards."""
    parts = dict(rollout.reward_parts)
    for role in rollout.roles:
        of_role = [score.parts for trajectory, score in scores if trajectory.role == role]
        for name in dict.fromkeys(name for part in of_role for name in part):
            values = [part[name] for part in of_role if name in part]
            parts[name if role == POLICY else f"{role}/{name}"] = sum(values) / len(values)
    correct = all_correct(score.correct for _, score in scores) if rollout.correct is None else rollout.correct
    trajectories = tuple(replace(each, reward=each.reward + score.value) for each, score in scores)
    return replace(rollout, trajectories=trajectories, reward_parts=parts, correct=correct)
