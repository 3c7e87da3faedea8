"""All rewards read answers in the same way: a table of the field, numbers in random notation, and hostile replies."""

from __future__ import annotations

import re
import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rl.rewards import answer_table as table
from tests.rl.rewards.test_rewards import answer
from tinsmith import make_reward
from tinsmith.rl.rewards.base import Score

GAME = '{"target": 24, "numbers": [1, 2, 3, 4]}'
ALL = (table.NUMBER_BOXED, table.MATH_BOXED, table.MATH, table.MATH_VERIFY)
PLACES = (
    (table.NUMBER_BOXED, "so it is $\\boxed{{{}}}$."),
    (table.MATH_BOXED, "so it is \\boxed{{{}}}"),
    (table.MATH, "<think>a</think> <answer>{}</answer>"),
    (table.MATH_VERIFY, "<think>1</think> so it is\n\\[\\boxed{{{}}}\\]"),
)


def is_right(settings: dict[str, Any], right: str, reply: str) -> bool | None:
    return Score.of(make_reward(settings).score(answer(right), reply)).correct


def rows_of_the_table() -> list[tuple[dict[str, Any], str, str, bool]]:
    """The whole table as (reward, answer, reply, right)."""
    rows = [(reward, *row) for row in table.BOXES for reward in (ALL if "box" in row[1] else ALL[:2])]
    rows += [
        (reward, right, place.format(content), verdict)
        for right, content, verdict in table.NUMBERS
        for reward, place in (PLACES[:1] if content in table.NUMBER_ONLY else PLACES)
    ]
    rows += [
        (reward, right, place.format(content), verdict)
        for right, content, verdict in table.EXPRESSIONS + table.CHOICES_AND_WORDS
        for reward, place in PLACES[1:3]
    ]
    rows += [(reward, *row) for row in table.PROSE for reward in (table.MATH, table.MATH_VERIFY)]
    rows += [(table.NUMBER_LAST, *row) for row in table.LAST_NUMBERS]
    rows += [(table.NUMBER_MARKED, *row) for row in table.MARKED_NUMBERS]
    rows += [(table.NUMBER_REPLY, *row) for row in table.WHOLE_NUMBERS]
    return rows + [(table.COUNTDOWN, GAME, *row) for row in table.GAMES]


def test_verdicts_of_the_table():
    wrong = [row for row in rows_of_the_table() if is_right(*row[:3]) is not row[3]]
    assert wrong == []


INTEGERS = st.integers(-(10**9), 10**9)
RATIONALS = st.builds(Fraction, st.integers(-999, 999), st.integers(1, 999))
WRAPPERS = (
    "{}",
    " {} ",
    "${}$",
    "\\text{{{}}}",
    "x = {}",
    "{}.",
    "{{{}}}",
    "{}\\text{{ cm}}",
    "\\({}\\)",
)


def spellings(value: Fraction) -> list[str]:
    """Ways to write a number."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    above, below = size.numerator, size.denominator
    if below == 1:
        digits = f"{above:,}"
        return [
            *(
                f"{sign}{above}",
                f"{sign}{digits}",
                sign + digits.replace(",", "{,}"),
                sign + digits.replace(",", "\\,"),
            ),
            *(
                f"{sign}{above}.0",
                f"{sign}\\frac{{{2 * above}}}{{2}}",
                f"{sign}{above} \\times 10^{{0}}",
                f"{value.numerator}e0",
            ),
        ]
    whole, rest = divmod(above, below)
    mixed = [f"{sign}{whole}\\frac{{{rest}}}{{{below}}}", f"{sign}{whole} {rest}/{below}"] if whole else []
    return [
        *(
            f"{sign}{above}/{below}",
            f"{sign}\\frac{{{above}}}{{{below}}}",
            f"{sign}\\dfrac{{{3 * above}}}{{{3 * below}}}",
        ),
        *(f"\\frac{{{sign}{above}}}{{{below}}}", sign.replace("-", "−") + f"\\tfrac{{{above}}}{{{below}}}", *mixed),
    ]


@settings(max_examples=40, deadline=None)
@given(st.one_of(INTEGERS.map(Fraction), RATIONALS), st.data())
def test_equal_numbers_are_right_and_others_wrong(value: Fraction, data: st.DataObject):
    right = data.draw(st.sampled_from(spellings(value)), "answer")
    other = data.draw(
        st.one_of(INTEGERS.map(Fraction), RATIONALS, st.just(-value), st.just(value + 1)).filter(lambda x: x != value)
    )
    reward, place = data.draw(st.sampled_from(PLACES))
    for number, verdict in ((value, True), (other, False)):
        text = data.draw(st.sampled_from(WRAPPERS)).format(data.draw(st.sampled_from(spellings(number))))
        assert is_right(reward, right, place.format(text)) is verdict, (right, text)


@settings(max_examples=40, deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(0, 12), st.integers(1, 10**6))
def test_decimals_are_exact(digits: int, places: int, change: int):
    right, other = (f"{Decimal(number).scaleb(-places):f}" for number in (digits, digits + change))
    for reward, place in PLACES:
        assert is_right(reward, right, place.format(f"{right}00" if "." in right else f"{right}.00"))
        assert is_right(reward, right, place.format(f"{digits} \\times 10^{{-{places}}}"))
        assert not is_right(reward, right, place.format(other))


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("\\{}()[]$ 12.,^_/-+=x!%&\n<>") | st.characters(), max_size=40))
def test_any_text_has_a_verdict(text: str):
    for reward in (table.NUMBER_BOXED, table.NUMBER_LAST, table.NUMBER_MARKED, table.MATH_BOXED):
        assert is_right(reward, "5", text) in (True, False)
        assert is_right(reward, "5", f"\\boxed{{{text}") in (True, False)
    if not re.search(r"5|\\box", text):
        assert not is_right(table.NUMBER_BOXED, "5", f"\\boxed{{5}} \\boxed{{{text}")


@pytest.mark.parametrize(
    "reply",
    [
        "9" * 100_000,
        "\\boxed{" + "9" * 100_000 + "}",
        "\\boxed{" * 10_000,
        "\\boxed{" + "(" * 50_000 + ")" * 50_000 + "}",
        "\\boxed{" + "\\frac{" * 800 + "1" + "}{2}" * 800 + "}",
        "\\boxed{" + "\\text{" * 800 + "6" + "}" * 800 + "}",
        "\\boxed{1e99999999}",
        "\\boxed{9^9^9^9}",
        "\\boxed{1000000!}",
        "\\boxed{" + "+".join(f"1/{base}^{{999}}" for base in range(2, 400)) + "}",
        "\\[" * 50_000,
        "$a " * 30_000,
        "<think>" * 20_000,
        "the answer is " * 8_000,
        "1 and " * 20_000,
    ],
    ids=lambda reply: reply[:12],
)
def test_hostile_replies_are_wrong_soon(reply: str):
    begin = time.process_time()
    for where in ("boxed", "last", "reply", "marked"):
        assert not is_right({"type": "number", "where": where}, "5", reply)
    assert time.process_time() - begin < 20  # in the run's own process; seconds are minutes without the limits


def test_gold_answers_are_read_as_replies_are():
    for right in ("42", r"\boxed{42}", "so it is 42\n#### 42", r"$42$", r"\text{42}", "x = 42", r"42\text{ cm}"):
        for reward, place in PLACES:
            assert is_right(reward, right, place.format("42"))
            assert not is_right(reward, right, place.format("43"))


def test_an_answer_that_is_a_fraction_is_not_its_last_number():
    assert not is_right(table.NUMBER_LAST, r"\frac{1}{2}", "2")
    assert is_right(table.NUMBER_LAST, r"\frac{1}{2}", "0.5")
