"""Filters drop the rollouts and groups that they name; refills replace them up to a bound."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from tests.rl.algorithms.helpers import columns, run
from tests.rl.scripted_run import Killed, breaking, rows, settings
from tests.rl.scripted_run import run as train
from tinsmith.errors import TinsmithError
from tinsmith.rl.algorithms.algorithm import Algorithm
from tinsmith.rl.algorithms.config import AlgorithmConfig
from tinsmith.rl.rollouts.filters import FilterConfig, GroupFilters, RewardStd
from tinsmith.rl.types import Group, Rollout, Task, Trajectory, Turn

FILTERS = TypeAdapter(tuple[FilterConfig, ...])


def rollout(reward: float, stop: str = "stop", error: str = "") -> Rollout:
    turn = Turn(prompt=(1,), tokens=(2, 3), logprobs=(-0.5, -0.5), text="", stop=stop)  # type: ignore[arg-type]
    return Rollout.single((turn,), reward, error=error)


def group(*rollouts: Rollout | float) -> Group:
    """A group of rollouts; a number stands for a rollout with that reward."""
    made = tuple(item if isinstance(item, Rollout) else rollout(item) for item in rollouts)
    return Group(task=Task(id="t", messages=()), rollouts=made)


def remaining(filters: list[dict], groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups that the filters keep."""
    return GroupFilters(FILTERS.validate_python(filters)).remaining(groups)


def left(filters: list[dict], *groups: Group) -> list[tuple[float, ...]]:
    """Rewards of each group that the filters keep."""
    return [group.rewards for group in remaining(filters, groups)]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], [(0.0, 1.0), (1.0, 1.0), (0.2, 0.4), (-1.0, 3.0)]),
        ([{"type": "reward", "low": 0.3}], [(1.0,), (1.0, 1.0), (0.4,), (3.0,)]),
        ([{"type": "reward", "low": 0.0, "high": 1.0}], [(0.0, 1.0), (1.0, 1.0), (0.2, 0.4)]),
        ([{"type": "group_mean", "high": 0.9}], [(0.0, 1.0), (0.2, 0.4)]),
        ([{"type": "reward_std"}], [(0.0, 1.0), (0.2, 0.4), (-1.0, 3.0)]),
        ([{"type": "reward_std", "threshold": 0.1001}], [(0.0, 1.0), (-1.0, 3.0)]),
        ([{"type": "reward", "low": 0.3}, {"type": "reward_std"}], []),
    ],
)
def test_filters_drop_rollouts_and_groups_outside_bounds(filters, expected):
    assert left(filters, group(0.0, 1.0), group(1.0, 1.0), group(0.2, 0.4), group(-1.0, 3.0)) == expected


def test_valid_reward_drops_non_finite_rewards_only():
    sampled = group(math.nan, 1.0, rollout(0.0, error="gone"), math.inf)
    (filtered,) = remaining([{"type": "valid_reward"}], [sampled])
    assert [rollout.error for rollout in filtered.rollouts] == ["", "gone"]
    assert left([{"type": "valid_reward"}], group(math.nan)) == []


def test_cut_replies_count_in_baselines_but_are_not_trained():
    sampled = group(rollout(1.0), rollout(0.0, stop="length"), rollout(0.5))
    (filtered,) = remaining([{"type": "cut"}], [sampled])
    assert filtered.rewards == (1.0, 0.0, 0.5)
    config = AlgorithmConfig.model_validate({"type": "grpo", "merge_replies": False})
    algorithm = Algorithm(config, frozenset(), columns(), 0)
    update = run(algorithm.score(1, [filtered, group(0.0, 1.0)]))
    assert [row.advantages[-1] for row in update.rows] == [0.5, -0.5, 0.5]
    assert left([{"type": "cut", "drop": True}], sampled) == [(1.0, 0.5)]


@pytest.mark.parametrize("name", ["rloo", "opmd", "reinforceplusplus", "raft", "multi_step_grpo", "rec", "grpo_std"])
def test_algorithms_accept_rollouts_without_turns(name):
    (filtered,) = remaining([{"type": "cut"}], [group(rollout(1.0, stop="length"), 0.5, 0.2)])
    config = AlgorithmConfig.model_validate({"type": name})
    update = run(Algorithm(config, frozenset(), columns(), 0).score(1, [filtered]))
    assert len(update.rows) <= 2


@pytest.mark.parametrize(
    ("values", "sentence"),
    [({"type": "reward"}, "set low, high or both"), ({"type": "group_mean", "low": 1, "high": 0}, "is above high")],
)
def test_filters_reject_missing_or_crossed_bounds(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        FILTERS.validate_python([values])


FILTERED = {"filters": [{"type": "reward_std"}], "algorithm": {"type": "rloo", "kl": {"type": "none", "coef": 0}}}


def test_step_without_refills_trains_on_remaining_groups(tmp_path):
    train(settings(tmp_path, **FILTERED))
    trained = [row for row in rows(tmp_path) if "reward/mean" in row]
    for row in trained:
        assert row["filters/dropped"] == pytest.approx(row["groups/constant"])
    assert any(0 < row["filters/dropped"] < 1 for row in trained)


def test_refills_sample_other_tasks(tmp_path):
    train(settings(tmp_path, filter_refills=20, steps=6, **FILTERED))
    trained = [row for row in rows(tmp_path) if "reward/mean" in row]
    assert any(row["filters/refills"] > 0 for row in trained)
    for row in trained:
        lines = (tmp_path / "rollouts" / f"train-{row['step']:06}.jsonl").read_text().splitlines()
        sampled = len(lines) / 4
        assert sampled == 3 * (1 + row["filters/refills"])
        assert (1 - row["filters/dropped"]) * sampled == pytest.approx(3)


@pytest.mark.parametrize("changes", [{"filter_refills": 20}, {"updates": {"stream": 3}}], ids=["refills", "stream"])
def test_filters_run_once_for_each_group(tmp_path, monkeypatch, changes):
    of, calls = RewardStd.of, []
    monkeypatch.setattr(RewardStd, "of", lambda self, group: calls.append(group.task.id) or of(self, group))
    summed = {**FILTERED["algorithm"], "aggregate": "token_sum"}
    train(settings(tmp_path, steps=4, **changes, **{**FILTERED, "algorithm": summed}))
    lines = [line for file in (tmp_path / "rollouts").glob("train-*") for line in file.read_text().splitlines()]
    assert len(calls) == len(lines) / 4


def test_outcome_of_filters_is_kept_as_long_as_the_group():
    filters = GroupFilters(FILTERS.validate_python([{"type": "reward_std"}]))
    sampled = group(0.0, 1.0)
    assert filters.remaining([sampled])[0] is filters.remaining([sampled])[0]
    alive = weakref.ref(sampled)
    del sampled
    gc.collect()
    assert alive() is None
    assert filters.remaining([group(1.0, 1.0)]) == ()


def test_exhausted_refills_are_an_error_with_a_fix(tmp_path):
    never = {**FILTERED, "rewards": [{"type": "format", "pattern": "never"}]}
    message = r"Step 1: the filters keep 0 of 9 groups, but a step needs 3.*filter_refills"
    with pytest.raises(TinsmithError, match=message):
        train(settings(tmp_path, filter_refills=2, **never))
    with pytest.raises(ValueError, match="set filters"):
        settings(tmp_path, filter_refills=2)


def test_step_without_remaining_groups_is_skipped(tmp_path):
    train(settings(tmp_path, steps=1, **{**FILTERED, "rewards": [{"type": "format", "pattern": "never"}]}))
    assert [row["optim/skipped"] for row in rows(tmp_path) if "reward/mean" in row] == [1.0]


@pytest.mark.parametrize("order", ["shuffle", "difficulty"])
def test_killed_run_with_refills_resumes_with_equal_metrics(tmp_path, order):
    tasks = {"train": {"type": "largest", "size": 40}, "held_out": 5, "order": {"type": order}}
    changes = {"filter_refills": 20, "steps": 6, "checkpoint": {"every": 2}, "tasks": tasks, **FILTERED}
    train(settings(tmp_path / "whole", **changes))
    broken = settings(tmp_path / "broken", **changes)
    with pytest.raises(Killed):
        train(broken, breaking(tmp_path / "broken", calls=3, at="train"))
    train(broken)
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")


def several(*roles: tuple[str, tuple[float, ...]], trained: bool = True) -> Group:
    """A group with a trajectory of each role in each rollout, by their rewards."""
    turn = rollout(0.0).turns[0]
    rollouts = tuple(
        Rollout(
            trajectories=tuple(
                Trajectory(turns=(turn,), role=role, reward=reward, trained=trained or role == roles[0][0])
                for (role, _), reward in zip(roles, rewards, strict=True)
            )
        )
        for rewards in zip(*(rewards for _, rewards in roles), strict=True)
    )
    return Group(task=Task(id="t", messages=()), rollouts=rollouts)


@pytest.mark.parametrize(
    ("sampled", "roles"),
    [
        (several(("solver", (0.0, 1.0)), ("judge", (1.0, 1.0))), ["solver"]),
        (several(("solver", (1.0, 1.0)), ("judge", (0.0, 1.0))), ["judge"]),
        (several(("solver", (0.0, 1.0)), ("judge", (1.0, 0.0))), ["solver", "judge"]),
        (several(("solver", (1.0, 1.0)), ("judge", (0.0, 0.0))), None),
        (several(("solver", (1.0, 1.0)), ("judge", (0.0, 1.0)), trained=False), None),
        (several(("solver", (0.0, 1.0)), ("judge", (1.0, 1.0)), trained=False), ["solver", "judge"]),
    ],
)
def test_reward_std_drops_only_roles_of_equal_rewards(sampled, roles):
    filtered = remaining([{"type": "reward_std"}], [sampled])
    assert [list(group.roles) for group in filtered] == ([] if roles is None else [roles])


def test_untrained_siblings_count_for_the_filter():
    turn = rollout(0.0).turns[0]
    seen, unseen = (Trajectory(turns=(turn,), reward=float(at), trained=at == 0) for at in (0, 1))
    pair = Group(
        task=Task(id="t", messages=()), rollouts=tuple(Rollout(trajectories=(each,)) for each in (seen, unseen))
    )
    assert left([{"type": "reward_std"}], pair) == [(0.0, 1.0)]


def test_group_size_drops_roles_with_too_few_trajectories():
    lone = group(0.5, rollout(0.0, error="gone"))
    pair = group(0.5, 0.25)
    assert left([{"type": "group_size"}], lone, pair) == [(0.5, 0.25)]
    assert left([{"type": "group_size", "least": 1}], lone, pair) == [(0.5,), (0.5, 0.25)]
    assert left([{"type": "group_size", "least": 3}], lone, pair) == []


def test_termination_drops_rollouts_by_their_reason():
    ends = ("done", "max_turns", "max_response", "timeout")
    rollouts = [replace(rollout(float(at)), termination=reason) for at, reason in enumerate(ends)]
    assert left([{"type": "termination", "reasons": ["max_turns", "timeout"]}], group(*rollouts)) == [(0.0, 2.0)]
    assert left([{"type": "termination", "reasons": list(ends)}], group(*rollouts)) == []
    with pytest.raises(ValueError, match="reasons"):
        FILTERS.validate_python([{"type": "termination", "reasons": ["tired"]}])


def test_partly_solved_groups_are_sampled_for_and_all_are_kept(tmp_path):
    changes = {"algorithm": {"type": "rloo"}, "group_size": 2, "steps": 4, "filter_refills": 30}
    train(settings(tmp_path, min_partial_groups=3, **changes))
    trained = [row for row in rows(tmp_path) if "reward/mean" in row]
    assert any(row["filters/refills"] > 0 for row in trained)
    for row in trained:
        lines = (tmp_path / "rollouts" / f"train-{row['step']:06}.jsonl").read_text().splitlines()
        assert len(lines) == 2 * 3 * (1 + row["filters/refills"])
        assert (1 - row["groups/constant"]) * len(lines) / 2 >= 3 - 1e-9
    with pytest.raises(ValueError, match="set filter_refills"):
        settings(tmp_path, min_partial_groups=3)


def test_step_without_partly_solved_groups_is_an_error(tmp_path):
    never = {"rewards": [{"type": "format", "pattern": "never"}], "min_partial_groups": 1}
    with pytest.raises(TinsmithError, match=r"Step 1: 0 of 9 groups solved in part, but a step needs 1"):
        train(settings(tmp_path, filter_refills=2, **never))
