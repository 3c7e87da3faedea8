"""Countdown: each number exactly once, and exactly the target."""

from __future__ import annotations

import pytest

from tests.rl.rewards.test_rewards import answer, worth
from tinsmith.rl.rewards.countdown import Countdown


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<answer>(1 + 2 + 3) * 4</answer>", 1.0),
        ("<answer>4 * (3 + 2 + 1) = 24</answer>", 1.0),
        ("<answer>4 * (3 + 2 + 1) = 48 / 2</answer>", 1.0),
        ("<answer>4 * (3 + 2 + 1) = 25</answer>", 0.1),
        ("<answer>4 * (3 + 2 + 1) = 24 pieces</answer>", 0.1),
        ("<answer>4 * (3 + 2 + 1) =</answer>", 0.1),
        ("<answer>24 = 4 * (3 + 2 + 1)</answer>", 0.1),
        ("so <Answer>\n  (1 + 2 + 3)\n  × 4\n</ANSWER>.", 1.0),
        (r"<answer>$\left(1 + 2 + 3\right) \times 4$</answer>", 1.0),
        ("<answer>-(1 + 2 + 3) * -4.0</answer>", 1.0),
        ("<answer>24</answer> <answer>1 * 2 * 3 * 4</answer>", 1.0),
        ("<answer>1 * 2 * 3 * 4</answer> <answer>24</answer>", 0.1),
        ("<answer>1 * 2 * 3 * 4</answer> <answer>24", 1.0),
        ("<answer>1 + 2 + 3 + 4</answer>", 0.1),
        ("<answer>6 * 4</answer>", 0.1),
        ("<answer>4 * 3 * 2</answer>", 0.1),
        ("<answer>4 * 3 * 2 * 1 * 1</answer>", 0.1),
        ("<answer>1.2 * 3 * 4 + 9.6</answer>", 0.1),
        ("<answer>1 / 0 + 2 + 3 + 4</answer>", 0.1),
        ("<answer>__import__('os')</answer>", 0.1),
        ("<answer>2 ** 3 * (4 - 1)</answer>", 0.1),
        ("<answer>" + "9**" * 100_000 + "9</answer>", 0.1),
        ("<answer></answer>", 0.1),
        ("(1 + 2 + 3) * 4", 0.0),
        ("", 0.0),
    ],
)
@pytest.mark.parametrize("key", ["numbers", "nums"])
def test_countdown_requires_each_number_once(key, text, value):
    assert worth(Countdown(), answer(f'{{"target": 24, "{key}": [1, 2, 3, 4]}}'), text) == value
    assert worth(Countdown(partial=0.0), answer(f'{{"target": 24, "{key}": [1, 2, 3, 4]}}'), text) == float(value == 1)


def test_countdown_values_are_exact():
    task = answer('{"target": 1, "numbers": [3, 1, 3]}')
    assert worth(Countdown(), task, "<answer>1 / 3 * 3</answer>") == 1.0
    close = answer('{"target": 0.5, "numbers": [5000001, 10000000]}')
    assert worth(Countdown(), close, "<answer>5000001 / 10000000</answer>") == 0.1


def test_countdown_counts_equal_numbers_apart():
    task = answer('{"target": 10, "numbers": [5, 5]}')
    assert worth(Countdown(), task, "<answer>5 + 5</answer>") == 1.0
    assert worth(Countdown(), task, "<answer>2 * 5</answer>") == 0.1


def test_countdown_without_numbers_is_an_error():
    with pytest.raises(ValueError, match="no target and numbers"):
        Countdown().score(answer("24"), "<answer>24</answer>")
