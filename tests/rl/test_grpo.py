"""GRPO's advantages, by hand."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from pydantic import ValidationError

from tinsmith.rl import algorithms
from tinsmith.rl.algorithms.grpo import GrpoConfig
from tinsmith.rl.types import Group, Rollout, Task, Turn


def group(*rewards: float | None) -> Group:
    turn = Turn(prompt=(1,), tokens=(2, 3), logprobs=(0.0, 0.0), text="", stop="stop")
    rollouts = [
        Rollout(error="gone") if reward is None else Rollout(turns=(turn,), rewards={"policy": reward})
        for reward in rewards
    ]
    return Group(task=Task(id="t", messages=()), rollouts=tuple(rollouts))


def advantages(config: GrpoConfig, *groups: Group):
    return asyncio.run(algorithms.build(config).score(groups))


def test_the_advantage_is_reward_less_mean_on_every_token():
    (scored,) = advantages(GrpoConfig(), group(1.0, 0.0, 0.5))
    assert [one.tolist() for one in scored] == [[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0]]
    assert scored[0].dtype == np.float32


def test_normalizing_divides_by_the_groups_deviation():
    (scored,) = advantages(GrpoConfig(normalize=True), group(1.0, 0.0))
    assert [one[0] for one in scored] == pytest.approx([1.0, -1.0], abs=1e-4)


def test_constant_groups_are_dropped_unless_told_otherwise():
    assert advantages(GrpoConfig(), group(1.0, 1.0), group(1.0, None)) == [[], []]
    (scored,) = advantages(GrpoConfig(drop_constant=False, normalize=True), group(1.0, 1.0))
    assert [one.tolist() for one in scored] == [[0.0, 0.0], [0.0, 0.0]]


def test_a_failed_rollout_has_no_part_in_the_mean():
    (scored,) = advantages(GrpoConfig(), group(1.0, None, 0.0))
    assert [one.tolist() for one in scored] == [[0.5, 0.5], [], [-0.5, -0.5]]


def test_the_loss_is_as_configured_and_its_options_are_checked():
    config = GrpoConfig(loss_fn="ppo", loss_config={"clip_high_threshold": 1.3})
    algorithm = algorithms.build(config)
    assert (algorithm.loss.name, algorithm.loss.config) == ("ppo", {"clip_high_threshold": 1.3})
    with pytest.raises(ValidationError, match="dro has no option clip_high_threshold; it has: beta"):
        GrpoConfig(loss_fn="dro", loss_config={"clip_high_threshold": 1.3})


@pytest.mark.parametrize(
    ("loss_fn", "merge"), [("importance_sampling", True), ("ppo", True), ("cispo", True), ("dro", False)]
)
def test_replies_are_merged_only_where_the_loss_is_linear_in_the_advantage(loss_fn, merge):
    assert algorithms.build(GrpoConfig(loss_fn=loss_fn)).merge is merge
    assert algorithms.build(GrpoConfig(loss_fn=loss_fn, merge_replies=False)).merge is False
