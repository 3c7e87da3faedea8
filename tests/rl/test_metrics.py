"""Metrics of a step equal values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tinsmith.rl.metrics import group_metrics, update_metrics
from tinsmith.rl.policy.base import UpdateResult
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.rl.types import Group, Rollout, Task, Turn

TASK = Task(id="t", messages=())


def rollout(reward: float, *, stop="stop", tokens=(2, 3)) -> Rollout:
    turn = Turn(prompt=(1,), tokens=tokens, logprobs=(0.0,) * len(tokens), text="", stop=stop)
    return Rollout.single((turn,), reward, reward_parts={"number": reward})


def test_group_metrics_count_rewards_failures_and_tokens():
    groups = [
        Group(task=TASK, rollouts=(rollout(1.0), rollout(0.0, stop="length", tokens=(1, 2, 3, 4))), version=3),
        Group(task=TASK, rollouts=(rollout(1.0), Rollout(error="gone")), version=4),
    ]
    numbers = group_metrics(groups, version=5)
    assert numbers["reward/mean"] == pytest.approx(2 / 3)
    assert numbers["reward/number"] == pytest.approx(2 / 3)
    assert numbers["groups/constant"] == 0.5
    assert numbers["rollouts/failed"] == 1
    assert numbers["rollouts/cut"] == pytest.approx(1 / 3)
    assert numbers["tokens/sampled"] == 8
    assert numbers["policy/staleness"] == 1.5
    assert numbers["policy/staleness_max"] == 2


def test_ratio_kl_and_entropy_weigh_merged_rows_by_count():
    def row(q: float, count: int) -> TrainingRow:
        values = np.array([0.0, q], np.float32)
        return TrainingRow(
            tokens=np.array([1, 2]),
            targets=np.array([2, 3]),
            logprobs=values,
            advantages=values,
            mask=np.array([False, True]),
            count=count,
        )

    updated = UpdateResult(
        logprobs=(np.array([-9.0, -1.5], np.float32), np.array([-9.0, -2.0], np.float32)),
        metrics={"loss:sum": -3.0, "grad_norm": 2.0},
    )
    numbers = update_metrics([row(-1.0, 3), row(-2.0, 1)], updated, {"clip_fraction": 0.25})
    assert numbers["optim/ratio_mean"] == pytest.approx((3 * np.exp(-0.5) + 1) / 4)
    assert (numbers["optim/ratio_max"], numbers["optim/clip_fraction"]) == (1.0, 0.25)
    assert numbers["optim/kl_sample_train_v1"] == pytest.approx(3 * 0.5 / 4)
    assert numbers["optim/kl_sample_train_v2"] == pytest.approx(3 * 0.25 / 4 / 2)
    assert numbers["optim/entropy"] == pytest.approx((3 * 1 + 2) / 4)
    assert (numbers["optim/loss"], numbers["optim/grad_norm"]) == (-3.0, 2.0)


def test_group_metrics_are_zero_when_every_rollout_failed():
    numbers = group_metrics([Group(task=TASK, rollouts=(Rollout(error="a"), Rollout(error="b")))], version=0)
    assert (numbers["reward/mean"], numbers["tokens/sampled"], numbers["rollouts/failed"]) == (0.0, 0, 2)
