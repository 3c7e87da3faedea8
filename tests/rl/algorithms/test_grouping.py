"""Comparison groups: by role, by turn and by rollout, against hand-computed advantages."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from pydantic import ValidationError

from tinsmith.rl.algorithms.algorithm import Algorithm
from tinsmith.rl.algorithms.config import AlgorithmConfig
from tinsmith.rl.algorithms.grouping import comparison_groups
from tinsmith.rl.types import Group, Rollout, Task, Trajectory, Turn

TASK = Task(id="t/0", messages=())
FAILED = Rollout(error="broken")


def trajectory(role: str, reward: float, *turn_rewards: float, token: int = 7) -> Trajectory:
    """A trajectory of a turn of one token for each turn reward, or of one turn; each token has another id."""
    turns = tuple(
        Turn(prompt=(1, token + at), tokens=(token,), logprobs=(-0.5,), text="", stop="stop", reward=turn_reward)
        for at, turn_reward in enumerate(turn_rewards or (None,))
    )
    return Trajectory(role=role, turns=turns, reward=reward)


def group(*rollouts: tuple[Trajectory, ...]) -> Group:
    return Group(task=TASK, rollouts=tuple(Rollout(trajectories=each) for each in rollouts))


def solver_judge(first: float, second: float, judge: float, token: int) -> tuple[Trajectory, ...]:
    return (
        trajectory("solver", first, token=token),
        trajectory("solver", second, token=token + 10),
        trajectory("judge", judge, token=token + 20),
    )


def config(**changes) -> AlgorithmConfig:
    advantage = {"type": "grpo", "normalize": "none", "std_threshold": None}
    return AlgorithmConfig.model_validate({"advantage": advantage, "merge_replies": False, **changes})


def advantages(settings: AlgorithmConfig, groups: list[Group], group_size: int = 2) -> dict[int, list[float]]:
    """Advantages by the sampled token, in order of rows."""
    algorithm = Algorithm(settings, frozenset(), {}, 0, group_size)
    result: dict[int, list[float]] = {}
    for row in asyncio.run(algorithm.score_part(1, groups)).rows:
        result.setdefault(int(row.targets[-1]), []).append(float(row.advantages[-1]))
    return result


def test_roles_of_a_task_are_compared_apart():
    groups = [group(solver_judge(1, 0, 1, token=100), solver_judge(0, 0, 0, token=200))]
    assert [(each.role, len(each.trajectories)) for each in comparison_groups(groups, "role")] == [
        ("solver", 4),
        ("judge", 2),
    ]
    # Solvers: 1, 0, 0, 0 with mean 1/4. Judges: 1, 0 with mean 1/2.
    assert advantages(config(), groups) == {
        100: [0.75], 110: [-0.25], 120: [0.5], 200: [-0.25], 210: [-0.25], 220: [-0.5],
    }  # fmt: skip


def test_tasks_are_compared_apart():
    groups = [
        group(solver_judge(1, 1, 1, token=100), solver_judge(1, 1, 0, token=200)),
        group(solver_judge(0, 1, 0, token=300), solver_judge(0, 1, 0, token=400)),
    ]
    assert advantages(config(), groups) == {
        120: [0.5], 220: [-0.5], 300: [-0.5], 310: [0.5], 400: [-0.5], 410: [0.5],
    }  # fmt: skip


def test_statistics_of_a_step_are_those_of_one_role():
    settings = config(advantage={"type": "grpo", "normalize": "batch", "std_threshold": None})
    groups = [group(solver_judge(10, 0, 1, token=100), solver_judge(0, 10, 0, token=200))]
    judges = np.array([1.0, 0.0])
    expected = (judges - judges.mean()) / (judges.std(ddof=1) + 1e-6)
    values = advantages(settings, groups)
    assert [values[120][0], values[220][0]] == pytest.approx(expected.tolist())


def test_turns_are_compared_by_their_own_rewards():
    groups = [group((trajectory("policy", 3, 1, 2, token=100),), (trajectory("policy", 4, 0, 0, 4, token=200),))]
    # First turns 1, 0; second turns 2, 0; the third has no peer, and so no advantage.
    assert advantages(config(grouping="turn"), groups) == {100: [0.5, 1.0], 200: [-0.5, -1.0]}
    assert advantages(config(grouping="turn"), groups, group_size=1)[200] == [-0.5, -1.0, 4.0]


def test_turns_are_compared_by_their_discounted_returns():
    groups = [group((trajectory("policy", 3, 1, 2, token=100),), (trajectory("policy", 6, 0, 0, 4, token=200),))]
    # Returns 1 + 0.5 * 2, 2; and 0 + 0.5 * (0 + 0.5 * 6), 0 + 0.5 * 6, 6: the 2 of no turn are the last turn's.
    expected = {100: [0.25, -0.5], 200: [-0.25, 0.5]}
    assert advantages(config(grouping="turn", turn_discount=0.5), groups) == expected
    with pytest.raises(ValidationError, match="turn_discount is not used with grouping: role"):
        config(turn_discount=0.5)


def test_trajectories_of_one_rollout_are_compared():
    groups = [group(solver_judge(1, 0, 0.5, token=100), solver_judge(1, 1, 1, token=200))]
    assert advantages(config(grouping="rollout"), groups) == {100: [0.5], 110: [-0.5]}


def test_roles_have_their_own_advantage_or_none():
    groups = [group(solver_judge(1, 0, 1, token=100), solver_judge(0, 0, 3, token=200))]
    reinforced = config(roles={"judge": {"advantage": {"type": "reinforce"}}})
    values = advantages(reinforced, groups)
    assert (values[120], values[220], values[100]) == ([1.0], [3.0], [0.75])
    frozen = advantages(config(roles={"judge": {"train": False}}), groups)
    assert frozen.keys() == {100, 110, 200, 210}
    with pytest.raises(ValidationError, match="compares roles with each other"):
        config(grouping="rollout", roles={"judge": {"advantage": {"type": "reinforce"}}})


@pytest.mark.parametrize(
    "advantage", [{"type": "grpo", "std_threshold": None}, {"type": "rloo"}, {"type": "opmd"}, {"type": "rec"}]
)
def test_survivor_of_failed_siblings_is_not_trained_on(advantage: dict[str, object]):
    lone = Group(task=TASK, rollouts=(Rollout(trajectories=(trajectory("policy", 1.0),)), FAILED))
    assert advantages(config(advantage=advantage), [lone]) == {}
    assert advantages(config(advantage={"type": "reinforce"}), [lone]) == {7: [1.0]}


def test_group_size_one_trains_on_the_reward_itself():
    assert advantages(config(), [group((trajectory("policy", 1.0),))], group_size=1) == {7: [1.0]}


def test_trajectories_that_are_not_trained_count_in_the_baseline():
    seen = trajectory("policy", 1.0, token=100)
    unseen = Trajectory(role="policy", turns=trajectory("policy", 0.0, token=200).turns, trained=False)
    assert advantages(config(), [group((seen,), (unseen,))]) == {100: [0.5]}


def test_turns_that_begin_a_row_are_counted():
    def turn(prompt: tuple[int, ...], token: int) -> Turn:
        return Turn(prompt=prompt, tokens=(token,), logprobs=(-0.5,), text="", stop="stop")

    extending = Trajectory(turns=(turn((1,), 2), turn((1, 2, 3), 4)), reward=1.0)
    restarting = Trajectory(turns=(turn((1,), 2), turn((1, 9, 3), 4), turn((5,), 6)))
    algorithm = Algorithm(config(), frozenset(), {}, 0, 2)
    update = asyncio.run(algorithm.score_part(1, [group((extending,), (restarting,))]))
    assert (update.numbers, len(update.rows)) == ({"rows/breaks": 2.0}, 4)
    assert asyncio.run(algorithm.score_part(1, [group((trajectory("policy", 1.0),))])).numbers == {}
