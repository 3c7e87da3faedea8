"""Parsing and scoring of predictions, against hand computation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.integrations.minds.introspection.prediction import Parsed, parse, score
from tinsmith.integrations.minds.shadow.statistics import Moments


@pytest.mark.parametrize(
    ("text", "prediction", "answer"),
    [
        ("PREDICTION: -0.5\nANSWER: 12", -0.5, "12"),
        ("I think so.\nPREDICTION: +0.5\nANSWER: 1, 2\n3", 0.5, "1, 2\n3"),
        ("PREDICTION: −2\nANSWER: x", -2.0, "x"),
        ("PREDICTION: 1\nPREDICTION: 2\nANSWER: a\nANSWER: b", 2.0, "b"),
        ("<think>PREDICTION: 9\nANSWER: 9</think>PREDICTION: 1e-2\nANSWER: 3", 0.01, "3"),
        ("PREDICTION: about 0.5\nANSWER: 12", None, "12"),
        ("PREDICTION: 0.5 nats\nANSWER: 12", None, "12"),
        ("PREDICTION: 1.2.3\nANSWER: 12", None, "12"),
        ("ANSWER: 12", None, "12"),
        ("ANSWER: 12\nPREDICTION: 0.5", None, "12\nPREDICTION: 0.5"),
        ("PREDICTION: 0.5\nANSWER:", 0.5, None),
        ("PREDICTION: 0.5", 0.5, None),
        ("The ANSWER: 12", None, None),
        ("", None, None),
    ],
)
def test_numbers_are_parsed_exactly(text, prediction, answer):
    assert parse(text, "absolute", 1) == Parsed(prediction=prediction, answer=answer)


@pytest.mark.parametrize(
    ("text", "sign"), [("+", 1.0), ("-", -1.0), ("−", -1.0), ("-0.3", -0.3), ("0", None), ("up", None)]
)
def test_signs_are_parsed(text, sign):
    assert parse(f"PREDICTION: {text}\nANSWER: 1", "sign", 1).prediction == sign


@pytest.mark.parametrize(
    ("text", "order"), [("2, 3, 1", (1, 2, 0)), ("1,2", None), ("1, 1, 2", None), ("0, 1, 2", None)]
)
def test_orders_are_parsed(text, order):
    assert parse(f"PREDICTION: {text}\nANSWER: 1", "rank", 3).prediction == order


def test_absolute_score_by_hand():
    scored = score(-0.25, [0.5], [Moments(0.3, 0.1)], "absolute")
    assert (scored.score, scored.error, scored.zero) == (0.25, 0.75, 0.5)
    assert scored.probe_mean == pytest.approx(0.2)
    assert score(5.0, [0.5], [Moments(0.3, 0.1)], "absolute").score == 0.0


def test_normalised_score_by_hand():
    scored = score(1.0, [0.5], [Moments(0.3, 0.1)], "normalised")  # z = 2
    assert scored.score == pytest.approx(0.5)
    assert (scored.error, scored.probe_mean, scored.zero) == (pytest.approx(1), pytest.approx(4), pytest.approx(25))


@pytest.mark.parametrize(("prediction", "delta", "value"), [(2.0, 0.1, 1.0), (-2.0, 0.1, 0.0), (-1.0, -0.1, 1.0)])
def test_sign_score_by_hand(prediction, delta, value):
    scored = score(prediction, [delta], [Moments(-0.3, 0.1)], "sign")
    assert (scored.score, scored.error, scored.zero) == (value, 1 - value, 0.5)
    assert scored.probe_mean == (delta > 0)


@given(st.permutations(range(5)), st.permutations(range(5)))
def test_rank_score_is_spearmans(order, changes):
    scored = score(
        tuple(order), [float(change) for change in changes], [Moments(float(at), 1.0) for at in range(5)], "rank"
    )
    places = [sorted(changes, reverse=True).index(change) for change in changes]  # 0: the largest rise

    def spearman(ranks):
        return 1 - 6 * sum((rank - place) ** 2 for rank, place in zip(ranks, places, strict=True)) / (5 * 24)

    assert scored.score == pytest.approx((1 + spearman([order.index(at) for at in range(5)])) / 2)
    assert scored.error == pytest.approx(1 - scored.score)
    assert scored.probe_mean == pytest.approx((1 - spearman([4 - at for at in range(5)])) / 2)


def test_equal_changes_have_no_order():
    scored = score((1, 0, 2), [0.0] * 3, [Moments(0.0, 1.0)] * 3, "rank")
    assert (scored.score, scored.zero, scored.probe_mean) == (0.5, 0.5, 0.5)


def test_trivial_predictions_have_no_skill():
    draw = np.random.default_rng(0)
    deltas = draw.normal(0.2, 0.1, 200)
    scores = [score(0.0, [float(delta)], [Moments(0.2, 0.1)], "normalised") for delta in deltas]
    assert sum(each.error for each in scores) == pytest.approx(sum(each.probe_mean for each in scores))
