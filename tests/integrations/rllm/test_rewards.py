"""Reward functions under the names of rLLM."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith.errors import UserError
from tinsmith.rllm import Action, countdown_reward_fn, math_reward_fn, zero_reward

TASK: dict[str, Any] = {"question": "…", "target": 24, "nums": [1, 2, 3, 4], "ground_truth": "24"}


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("<answer>1 * 2 * 3 * 4</answer>", 1.0),
        ("<answer>1 + 2</answer> no: <answer>(1 + 3) * (2 + 4)</answer>", 1.0),
        ("<answer>1 + 2 + 3 + 4</answer>", 0.0),
        ("<answer>4 * 3 * 2</answer>", 0.0),
        ("24", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_is_right_or_wrong(reply: str, reward: float):
    for action in (reply, Action(action=reply)):
        output = countdown_reward_fn(TASK, action)
        assert (output.reward, output.is_correct) == (reward, reward == 1.0)


def test_countdown_marks_partial_credit():
    assert countdown_reward_fn(TASK, "<answer>1 + 2</answer>").metadata["partial_credit"]
    assert not countdown_reward_fn(TASK, "none").metadata["partial_credit"]


def test_rows_without_data_are_errors():
    with pytest.raises(UserError, match=r"no 'target'.*fields are question"):
        countdown_reward_fn({"question": "?"}, "<answer>1</answer>")
    with pytest.raises(UserError, match="no 'ground_truth'"):
        math_reward_fn({}, "1")
    assert countdown_reward_fn(TASK, Action(action=None)).reward == 0.0


def test_math_compares_with_each_truth():
    task = {"question": "?", "ground_truth": ["1/2", "x"]}
    assert math_reward_fn(task, "so it is $\\boxed{0.5}$").is_correct
    assert not math_reward_fn(task, "so it is $\\boxed{0.6}$").is_correct
    assert math_reward_fn({"question": "?", "answer": 7}, "\\boxed{7}").reward == 1.0


def test_zero_reward_is_zero():
    assert zero_reward(TASK, "24").reward == 0.0
