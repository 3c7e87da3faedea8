"""Running moments of effects, against numpy."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tinsmith.integrations.minds.shadow.statistics import Moments, ProbeStatistics, moments_of


def test_moments_are_those_of_earlier_versions():
    draw = np.random.default_rng(1)
    statistics = ProbeStatistics({})
    seen: list[float] = []
    for version in range(4):
        moments = statistics.moments("a", version)
        if version:
            assert moments is not None
            assert (moments.mean, moments.std) == (pytest.approx(np.mean(seen)), pytest.approx(np.std(seen, ddof=1)))
        else:
            assert moments is None
        for delta in draw.normal(size=5):
            statistics.add("a", version, float(delta))
            seen.append(float(delta))


def test_order_of_rollouts_does_not_matter():
    deltas = np.random.default_rng(2).normal(size=20).tolist()
    results = []
    for order in (deltas, deltas[::-1]):
        statistics = ProbeStatistics({})
        for delta in order:
            statistics.add("a", 0, delta)
        results.append(statistics.moments("a", 1))
    assert results[0] == results[1]


def test_state_is_json_and_continues_exactly():
    state: dict = {}
    statistics = ProbeStatistics(state)
    for version in range(3):
        statistics.add("a", version, 0.1 * version)
        statistics.add("b", version, 0.3 - version)
    resumed = ProbeStatistics(json.loads(json.dumps(state)))
    assert resumed.moments("b", 3) == statistics.moments("b", 3)


def test_rare_probes_take_the_deviation_of_all():
    statistics = ProbeStatistics({})
    for delta in (1.0, 2.0, 3.0):
        statistics.add("often", 0, delta)
    statistics.add("rare", 0, 7.0)
    assert statistics.moments("rare", 1) == Moments(7.0, 1.0)
    assert statistics.moments("never", 1) is None


def test_moments_of_a_few_effects():
    assert moments_of([0.5, 0.7]).mean == pytest.approx(0.6)
    assert moments_of([-0.5]) == Moments(0.0, 0.5)
    assert moments_of([]).std == 1.0
