"""Derived values of groups and rollouts."""

from __future__ import annotations

from tinsmith.rl.types import Group, Rollout, Task, Turn

TASK = Task(id="t/0", messages=())


def rollout(reward: float, error: str = "") -> Rollout:
    return Rollout.single((), reward, error=error)


def test_group_is_constant_when_rewards_do_not_differ():
    assert Group(task=TASK, rollouts=(rollout(1.0), rollout(1.0))).constant
    assert Group(task=TASK, rollouts=(rollout(1.0), rollout(0.0, error="timeout"))).constant
    assert not Group(task=TASK, rollouts=(rollout(1.0), rollout(0.0))).constant


def test_group_rewards_exclude_failed_rollouts():
    assert Group(task=TASK, rollouts=(rollout(1.0), Rollout(error="x"), rollout(0.5))).rewards == (1.0, 0.5)


def test_rollout_text_is_the_last_turn():
    turns = tuple(Turn(prompt=(1,), tokens=(2,), logprobs=(0.0,), text=text, stop="stop") for text in ("a", "b"))
    assert Rollout.single(turns).text == "b"
    assert Rollout().text == ""
