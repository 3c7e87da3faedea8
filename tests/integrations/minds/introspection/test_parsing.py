"""Parsers of replies: tables of difficult cases, and properties."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.integrations.minds.introspection.parsing import (
    after_thoughts,
    answer_number,
    exact_number,
    integers,
    labelled,
    number_array,
    probability,
    ranking,
    single_number,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("-5", -5),
        ("−5", -5),
        ("+5", 5),
        (" -0.5 ", Fraction(-1, 2)),
        ("1.5", Fraction(3, 2)),
        (".5", Fraction(1, 2)),
        ("7.", 7),
        ("1,234,567", 1234567),
        ("1e3", 1000),
        ("12,34", None),
        ("1 5", None),
        ("--5", None),
        ("5 apples", None),
        ("1.5.2", None),
        ("1/2", None),
        ("٣", None),
        ("nan", None),
        ("inf", None),
        ("1e9999", None),
        ("", None),
        ("9" * 100, None),
    ],
)
def test_exact_number(text, value):
    assert exact_number(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[-0.5]", -0.5),
        ("-0.5", -0.5),
        ("The prediction is [-0.5]", -0.5),
        ("[1] no, [2]", 2.0),
        ("<think>[9]</think> [−3]", -3.0),
        ("<think>[9]", None),
        ("[0.5, 0.7]", None),
        ("[]", None),
        ('["0.5"]', None),
        ("[true]", None),
        ("[0.5", None),
        ("PREDICTION: -0.5", None),
        ("[1e400]", None),
    ],
)
def test_single_number(text, value):
    assert single_number(text) == value


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("[2, 0, 1]", (2, 0, 1)),
        ("Ranking: [2,0,1].", (2, 0, 1)),
        ("[0, 1, 2] or rather [2, 1, 0]", (2, 1, 0)),
        ("[2, 0]", None),
        ("[2, 0, 0]", None),
        ("[2, 0, 1, 1]", None),
        ("[3, 2, 1]", None),
        ("[-0, 1, 2]", (0, 1, 2)),
        ("[0.5, 1, 2]", None),
        ('[{"index": 2}, 0, 1]', None),
        ("2, 0, 1", None),
    ],
)
def test_ranking_is_a_permutation(text, order):
    assert ranking(text, 3) == order


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1, 2, 3, 4, 5", (1, 2, 3, 4, 5)),
        ("1 2 3 4 5", (1, 2, 3, 4, 5)),
        ("[0, 999, 007, 4, 5]", (0, 999, 7, 4, 5)),
        ("<think>a tower</think>\n1;2;3;4;5", (1, 2, 3, 4, 5)),
        ("1, 2, 3, 4", None),
        ("1, 2, 3, 4, 5, 6", None),
        ("1, 2, 3, 4, 1000", None),
        ("-1, 2, 3, 4, 5", None),
        ("1.5, 2, 3, 4, 5", None),
        ("The word is tower 1, 2, 3, 4, 5", None),
        ("1, 2, 3, 4, 5 tower", None),
        ("1, 2, tower, 4, 5", None),
        ("<think>1, 2, 3, 4, 5", None),
        ("١, 2, 3, 4, 5", None),
        ("1, 2, 3, 4, 5,", None),
        ("", None),
    ],
)
def test_integers_leave_no_room_for_words(text, values):
    assert integers(text, 5, 999) == values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("FINAL ANSWER: 11\nCONFIDENCE: 0.9", 0.9),
        ("confidence : 1", 1.0),
        ("CONFIDENCE: 0.2\nCONFIDENCE: 0.8", 0.8),
        ("CONFIDENCE: -0.5", None),
        ("CONFIDENCE: 1.5", None),
        ("CONFIDENCE: 90%", None),
        ("CONFIDENCE: high", None),
        ("CONFIDENCE:", None),
        ("my CONFIDENCE: 0.5", None),
        ("<think>CONFIDENCE: 0.5</think>", None),
        ("FINAL ANSWER: 11", None),
    ],
)
def test_confidence_is_a_probability_on_its_line(text, value):
    assert probability(labelled(text, "confidence")) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-5", -5),
        (r"\boxed{-5}", -5),
        (r"$\boxed{1,500}$", 1500),
        ("1.5", Fraction(3, 2)),
        ("11 or 12", None),
        (None, None),
    ],
)
def test_answers_keep_sign_and_point(text, value):
    assert answer_number(text) == value
    assert answer_number("5") != answer_number("-5")
    assert answer_number("15") != answer_number("1.5")


def test_thoughts_end_at_the_last_mark():
    assert after_thoughts("<think>a</think> b </think> c") == "c"
    assert after_thoughts("<think>a</think> b <think>") == ""
    assert after_thoughts("plain") == "plain"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6))
def test_json_arrays_of_numbers_are_read(values):
    assert number_array(f"so: {json.dumps(values)}") == tuple(values)


@given(st.permutations(range(6)))
def test_every_permutation_is_a_ranking(order):
    assert ranking(json.dumps(order), 6) == tuple(order)


@given(st.text(max_size=40))
def test_parsers_take_any_text(text):
    for value in (single_number(text), probability(labelled(text, "confidence")), answer_number(text)):
        assert value is None or isinstance(value, float | Fraction)
    sequence = integers(text, 5, 999)
    assert sequence is None or (len(sequence) == 5 and all(0 <= item <= 999 for item in sequence))
