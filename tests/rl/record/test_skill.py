"""Skill scores against hand computations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.rl.record.metrics import skill_scores, workflow_metrics
from tinsmith.rl.types import Rollout

PAIRS = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=20)


def rollouts(*metrics: dict[str, float]) -> list[Rollout]:
    """A rollout with each of these metrics."""
    return [Rollout(metrics=each) for each in metrics]


def test_skill_is_of_sums_and_not_of_ratios():
    values = [{"x/error": 1.0, "x/baseline": 10.0}, {"x/error": 3.0, "x/baseline": 0.0}, {}]
    assert skill_scores(rollouts(*values)) == {"x/skill": pytest.approx(1 - 4 / 10)}
    assert workflow_metrics("eval/workflow", rollouts(*values))["eval/workflow/x/skill"] == pytest.approx(0.6)


def test_trivial_answer_without_error_has_no_skill_score():
    assert skill_scores(rollouts(*[{"x/error": 1.0, "x/truth": 0.1}] * 3)) == {}
    assert skill_scores(rollouts({"x/error": 1.0})) == {}


def test_parts_have_their_own_means():
    values = [("a", 0.0, 1.0), ("a", 2.0, 0.0), ("b", 10.0, 0.5), ("b", 14.0, 0.5)]
    scores = skill_scores(rollouts(*({f"x/{part}/truth": t, f"x/{part}/error": e} for part, t, e in values)))
    # Squared deviations from the part's mean: a 1 + 1, b 4 + 4.
    assert scores == {
        "x/a/skill": pytest.approx(1 - 1 / 2),
        "x/b/skill": pytest.approx(1 - 1 / 8),
        "x/skill": pytest.approx(1 - 2 / 10),
    }


@given(PAIRS)
def test_skill_of_the_mean_is_zero_and_of_the_truth_one(pairs):
    truths = np.array([truth for truth, _ in pairs])
    if np.ptp(truths) < 1e-3:
        return
    for answers, skill in ((np.full(len(truths), truths.mean()), 0.0), (truths, 1.0)):
        metrics = [{"x/truth": t, "x/error": (t - a) ** 2} for t, a in zip(truths, answers, strict=True)]
        assert skill_scores(rollouts(*metrics))["x/skill"] == pytest.approx(skill, abs=1e-6)
