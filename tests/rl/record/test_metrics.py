"""Metrics of a step equal values computed by hand."""

from __future__ import annotations

import pytest

from tinsmith.rl.record.metrics import group_metrics
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


def test_group_metrics_are_zero_when_every_rollout_failed():
    numbers = group_metrics([Group(task=TASK, rollouts=(Rollout(error="a"), Rollout(error="b")))], version=0)
    assert (numbers["reward/mean"], numbers["tokens/sampled"], numbers["rollouts/failed"]) == (0.0, 0, 2)
