"""Rewards have the values that their docstrings state."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tinsmith.errors import ConfigError
from tinsmith.rl.data.sources import ReasoningGym
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rewards.base import Reward, Score
from tinsmith.rl.rewards.format import Format
from tinsmith.rl.rewards.gym import ReasoningGymScore
from tinsmith.rl.rewards.mathematics import Math, MathVerify
from tinsmith.rl.rewards.numbers import Closeness, Number
from tinsmith.rl.types import Rollout, Task, Turn
from tinsmith.testing import ScriptedSnapshot


def said(text: str) -> Rollout:
    """A rollout with one reply."""
    return Rollout.single((Turn(prompt=(1,), tokens=(2,), logprobs=(0.0,), text=text, stop="stop"),))


def scored(rewards: Rewards, task: Task, text: str) -> tuple[float, dict[str, float]]:
    """The reward of a reply, and its parts."""
    (trajectory,) = said(text).trajectories
    score = asyncio.run(rewards.score(task, trajectory, ScriptedSnapshot(("",), np.zeros(1), 0)))
    return score.value, dict(score.parts)


def worth(reward: Reward, task: Task, text: str) -> float:
    """The value of a reward for a text, compared in this process."""
    return Score.of(reward.score(task, text)).value


def answer(right: str) -> Task:
    """A task with the right answer `right`."""
    return Task(id="t/0", messages=(), answer=right)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("52", 1.0),
        (" 52\n", 1.0),
        ("50", 0.5 * (1 - 2 / 52)),
        ("104", 0.0),
        ("-3", 0.0),
        ("1000", 0.0),
        ("51.5", 0.0),
        ("52.", 0.0),
        ("The answer is 52", 0.0),
        ("39 + 13 = 52", 0.0),
        ("", 0.0),
    ],
)
def test_closeness_decreases_with_distance_for_bare_integers(text, value):
    assert worth(Closeness(), answer("52"), text) == pytest.approx(value, abs=1e-12)


def test_closeness_to_zero_is_relative_to_1():
    assert worth(Closeness(), answer("0"), "0") == 1.0
    assert worth(Closeness(), answer("0"), "1") == 0.0


@pytest.mark.parametrize(
    ("where", "text", "value"),
    [
        ("reply", "1,000", 1),
        ("reply", "1000.0", 1),
        ("reply", "it is 1000", 0),
        ("last", "500 + 500 = 1000.", 1),
        ("last", "1000 is more than 3", 0),
        ("last", "none", 0),
        ("boxed", r"so 7, \boxed{1000}", 1),
        ("boxed", "1000", 0),
    ],
)
def test_number_reads_the_answer_at_where(where, text, value):
    assert worth(Number(where=where), answer("1000"), text) == value


def test_number_reads_minus_between_numbers_as_subtraction():
    assert worth(Number(), answer("3"), "5-3") == 1.0
    assert worth(Number(), answer("-3"), "x = -3") == 1.0
    assert worth(Number(), answer("3"), "5−3") == 1.0
    assert worth(Number(), answer("-3"), "x = −3") == 1.0
    assert worth(Number(), answer("3"), "x = −3") == 0.0
    assert worth(Number(where="reply"), answer("−3"), "-3") == 1.0
    assert worth(Closeness(), answer("-3"), "−3") == 1.0


@pytest.mark.parametrize(
    ("right", "text", "value"),
    [
        ("100000", "1e5", 1.0),
        ("100000", "1.0E+5", 1.0),
        ("0.002", "2e-3", 1.0),
        ("0.002", "2e−3", 1.0),
        ("5", "1e5", 0.0),
        ("1e5", "100,000", 1.0),
        ("5", "5 eggs", 1.0),
        ("5", "1e99999999999999999999", 0.0),
        ("0", "1e-99999999999999999999", 0.0),
    ],
)
def test_number_reads_exponents(right, text, value):
    assert worth(Number(), answer(right), text) == value


def test_closeness_of_a_huge_number_is_zero():
    assert worth(Closeness(), answer("52"), "1e9999") == 0.0
    assert worth(Closeness(), answer("52"), "9" * 5000) == 0.0


def test_math_verify_compares_values_not_text():
    reward = MathVerify()
    assert worth(reward, answer(r"\frac{1}{2}"), r"Thus $x = 0.5$.") == 1.0
    assert worth(reward, answer("52"), r"\boxed{52}") == 1.0
    assert worth(reward, answer("52"), "it is 53") == 0.0


def test_format_matches_the_whole_reply():
    reward = Format(pattern=r"<think>.*</think>\s*\d+")
    assert worth(reward, answer("1"), "<think>a\nb</think> 12\n") == 1.0
    assert worth(reward, answer("1"), "well, <think>a</think> 12") == 0.0


def test_reasoning_gym_scores_its_own_tasks():
    task = ReasoningGym(dataset="basic_arithmetic", size=3).load()[1]
    assert worth(ReasoningGymScore(), task, f" {task.answer}\n") == 1.0
    assert worth(ReasoningGymScore(tag="answer"), task, f"so <answer>{task.answer}</answer>") == 1.0
    assert worth(ReasoningGymScore(tag="answer"), task, task.answer) == 0.0
    with pytest.raises(ValueError, match="is not a task of reasoning-gym"):
        ReasoningGymScore().score(answer("1"), "1")


def test_rewards_are_summed_by_weight_and_reported_by_name():
    rewards = Rewards([Number(where="reply"), Format(pattern=r"\d+", weight=0.1, name="bare")])
    assert scored(rewards, answer("52"), "52") == (pytest.approx(1.1), {"number": 1.0, "bare": 1.0})
    assert scored(rewards, answer("52"), "53") == (pytest.approx(0.1), {"number": 0.0, "bare": 1.0})


def test_reward_of_several_parts_is_their_sum():
    total, parts = scored(Rewards([Math(weight=2.0)]), answer("52"), "52")
    assert total == pytest.approx(1.8)
    assert parts == {"math": pytest.approx(0.9), "math/accuracy": 1.0, "math/format": -0.1}


def test_reward_is_zero_without_reward_functions():
    assert scored(Rewards([]), answer("52"), "52") == (0.0, {})


def test_rejects_duplicate_names_and_invalid_patterns():
    with pytest.raises(ConfigError, match="rewards"):
        Rewards([Number(), Number(where="reply")])
    with pytest.raises(ValueError, match="is not a regular expression"):
        Format(pattern="(")


def test_number_names_a_non_numeric_answer():
    with pytest.raises(ValueError, match="'Paris' of t/0 is not a number"):
        Number().score(answer("Paris"), "3")
