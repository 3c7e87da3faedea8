"""Rewards for mathematics, with the values that a GSM8K run relies on."""

from __future__ import annotations

import pytest

from tests.rl.rewards.test_rewards import answer, worth
from tinsmith.rl.rewards.format import Format
from tinsmith.rl.rewards.mathematics import Math, MathBoxed, MathVerify
from tinsmith.rl.rewards.numbers import Marked, Number
from tinsmith.rl.scoring.replies import boxed

GOLD = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = 72 altogether.\n#### 72"
FORM = "<think> 48 + 24 </think>\n<answer> 72 </answer>"


@pytest.mark.parametrize("gold", [GOLD, "72", "$72$"])
@pytest.mark.parametrize(
    ("text", "value"),
    [
        (FORM, 1.1),
        (FORM.replace("72", "71").replace("48 + 24", "no idea"), 0.1),
        ("so it is 72", 0.9),
        ("", -0.1),
        (FORM + "\nand more", 0.9),
        ("first: " + FORM, 1.1),
        ("<think>a<answer>72</answer>", 0.9),
        ("<think>48 + 24 = 72</think><answer>71</answer>", 0.1),
        ("<think>71?</think> <answer>72</answer>", 1.1),
    ],
)
def test_math_sums_accuracy_and_format(gold, text, value):
    assert worth(Math(), answer(gold), text) == pytest.approx(value)


def test_gold_answer_may_be_bare_marked_or_boxed():
    for gold in ("1/2", r"\frac{1}{2}", "half of it\n#### 0.5", r"so \boxed{\frac{1}{2}}"):
        assert worth(MathVerify(), answer(gold), r"$\frac{1}{2}$") == 1.0
    with pytest.raises(ValueError, match="math-verify cannot read the answer '' of t/0"):
        MathVerify().score(answer(""), "1")


@pytest.mark.parametrize(
    ("text", "think", "value"),
    [
        (r"so \boxed{72}", False, 1.0),
        (r"so \boxed{\frac{144}{2}}", False, 1.0),
        (r"\boxed{72}, no, \boxed{71}", False, 0.0),
        ("so 72", False, 0.0),
        (r"so \boxed{72}", True, 0.9),
        (r"<think>a</think> \boxed{72}", True, 1.0),
        (r"</think></think> \boxed{72}", True, 0.9),
        (r"</think><think> \boxed{72}", True, -0.1),
        (r"<think><think>a</think> 72", True, -0.1),
    ],
)
def test_math_boxed_reads_the_last_box(text, think, value):
    assert worth(MathBoxed(think=think), answer(GOLD), text) == pytest.approx(value)


def test_boxed_reads_nested_braces():
    assert boxed(r"a \boxed{x^{2}} b") == "x^{2}"
    assert boxed(r"a \boxed{x^{2} b") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("48 + 24 = 72\n#### 72", 1.0),
        ("#### 72", 1.0),
        ("so\n#### -1,072.5\n", 1.0),
        ("#### 10 #### 10", 0.0),
        ("#### 10\n#### 10", 0.0),
        ("so #### 72", 0.0),
        ("#### 72 clips", 0.0),
        ("#### 72\nand more", 0.0),
        ("####", 0.0),
        ("72", 0.0),
        ("##### 72", 0.0),
    ],
)
def test_marked_requires_one_marker_at_the_end(text, value):
    assert worth(Marked(), answer(GOLD), text) == value


def test_number_reads_the_answer_after_the_marker():
    reward = Number(where="marked")
    assert worth(reward, answer(GOLD), "71\n#### 72") == 1.0
    assert worth(reward, answer(GOLD), "72\n#### 71") == 0.0
    assert worth(reward, answer(GOLD), "72") == 0.0


def test_format_may_be_a_penalty():
    reward = Format(right=0.1, wrong=-0.1)
    assert worth(reward, answer(""), FORM) == 0.1
    assert worth(reward, answer(""), "72") == -0.1
