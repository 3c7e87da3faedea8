"""Rewards say what is right, apart from their values."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.rl.rewards.test_rewards import answer, said
from tinsmith.rl.data.sources import ReasoningGym
from tinsmith.rl.record.metrics import is_right
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rewards.base import Reward, Score
from tinsmith.rl.rewards.countdown import Countdown
from tinsmith.rl.rewards.format import Format, Overlong
from tinsmith.rl.rewards.gym import ReasoningGymScore
from tinsmith.rl.rewards.judge import Criterion, Judge
from tinsmith.rl.rewards.mathematics import Math, MathBoxed, MathVerify
from tinsmith.rl.rewards.numbers import Closeness, Marked, Number
from tinsmith.rl.types import Task
from tinsmith.rl.workflows.scoring import scored
from tinsmith.testing import ScriptedSnapshot

GAME = answer('{"target": 6, "numbers": [1, 2, 3]}')


def score(reward: Reward, task: Task, text: str, reply_of_judge: str = "") -> Score:
    policy = ScriptedSnapshot((reply_of_judge,), np.zeros(1), 0)
    return Score.of(asyncio.run(reward.judge(task, said(text), policy)))


@pytest.mark.parametrize(
    ("reward", "task", "text", "value", "correct"),
    [
        (Number(), answer("52"), "it is 52", 1.0, True),
        (Number(), answer("52"), "it is 51", 0.0, False),
        (Number(), answer("52"), "no idea", 0.0, False),
        (Closeness(), answer("52"), "52", 1.0, True),
        (Closeness(), answer("52"), "51", 0.5 * (1 - 1 / 52), False),
        (Closeness(), answer("52"), "it is 52", 0.0, False),
        (MathVerify(), answer("52"), r"\boxed{52}", 1.0, True),
        (MathVerify(), answer("52"), "53", 0.0, False),
        (Math(), answer("52"), "52", 0.9, True),
        (Math(), answer("52"), "<think>a</think><answer>51</answer>", 0.1, False),
        (MathBoxed(think=True), answer("52"), r"\boxed{52}", 0.9, True),
        (MathBoxed(), answer("52"), "52", 0.0, False),
        (Countdown(), GAME, "<answer>1 + 2 + 3</answer>", 1.0, True),
        (Countdown(), GAME, "<answer>6</answer>", 0.1, False),
        (Countdown(partial=1.0), GAME, "<answer>6</answer>", 1.0, False),
        (Countdown(), GAME, "1 + 2 + 3", 0.0, False),
        (Marked(), answer("52"), "#### 51", 1.0, None),
        (Format(pattern=".*"), answer("52"), "51", 1.0, None),
        (Overlong(max_tokens=2, margin=1), answer("52"), "51", 0.0, None),
    ],
    ids=lambda value: value.title if isinstance(value, Reward) else "",
)
def test_rewards_say_what_is_right(reward, task, text, value, correct):
    assert_says(reward, task, text, value, correct)


def assert_says(reward: Reward, task: Task, text: str, value: float, correct: bool | None) -> None:
    result = score(reward, task, text)
    assert result.value == pytest.approx(value)
    assert result.correct is correct
    assert reward.says_correct is (correct is not None)


@pytest.fixture(scope="module")
def gym() -> Task:
    """A task of reasoning-gym."""
    return ReasoningGym(dataset="basic_arithmetic", size=3).load()[1]


def test_reasoning_gym_says_what_is_right(gym):
    assert_says(ReasoningGymScore(), gym, gym.answer, 1.0, True)
    assert_says(ReasoningGymScore(), gym, "none", 0.0, False)
    assert_says(ReasoningGymScore(tag="a"), gym, gym.answer, 0.0, False)


def test_partial_score_of_reasoning_gym_is_not_right(gym):
    result = ReasoningGymScore().grade(gym, "", 0.99)
    assert (result.value, result.correct) == (0.99, False)


def test_judge_says_what_is_right_from_a_given_score():
    assert score(Judge(model="m"), answer("1"), "1", "Score: 10").correct is None
    assert not Judge(model="m").says_correct
    assert Judge(model="m", right_from=0.7).says_correct
    assert score(Judge(model="m", right_from=0.7), answer("1"), "1", "Score: 7").correct is True
    assert score(Judge(model="m", right_from=0.7), answer("1"), "1", "Score: 6").correct is False
    rubric = (Criterion(description="is right"), Criterion(description="is short"))
    assert score(Judge(model="m", rubric=rubric, right_from=1.0), answer("1"), "1", "[1, 0]").correct is False


@pytest.mark.parametrize(
    ("rewards", "text", "value", "right"),
    [
        ([Math()], "52", 0.9, True),
        ([Math()], "<think>a</think><answer>51</answer>", 0.1, False),
        ([Closeness(), Format(pattern=r"\d+", weight=0.6)], "51", 0.5 * (1 - 1 / 52) + 0.6, False),
        ([Closeness(), Format(pattern=r"\d+", weight=0.6)], "52", 1.6, True),
        ([Number(), Format(pattern="<b>.*", weight=-1.0)], "<b>52", 0.0, True),
        ([Format(pattern=r"\d+")], "51", 1.0, True),
    ],
    ids=["untagged", "tagged", "close and formatted", "exact and formatted", "penalized", "nobody says"],
)
def test_evaluation_counts_what_rewards_say_is_right(rewards, text, value, right):
    policy = ScriptedSnapshot(("",), np.zeros(1), 0)
    rollout = asyncio.run(scored(answer("52"), said(text), Rewards(rewards), policy))
    assert rollout.reward == pytest.approx(value)
    assert is_right(rollout, threshold=1.0) is right
