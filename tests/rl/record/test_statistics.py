"""Paired statistics against enumeration of all sign flips and all resamples, and against closed forms."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from tinsmith.rl.record import statistics
from tinsmith.rl.record.statistics import compare


def exact_p_value(differences: list[float]) -> float:
    observed = abs(sum(differences))
    signs = product((1, -1), repeat=len(differences))
    flips = [abs(sum(sign * each for sign, each in zip(row, differences, strict=True))) for row in signs]
    return sum(flip >= observed - 1e-9 for flip in flips) / len(flips)


@pytest.mark.parametrize("seed", range(6))
def test_few_differences_are_tested_exactly(seed):
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=9).round(1), rng.normal(0.3, size=9).round(1)
    result = compare(first, second)
    assert result.p_value == pytest.approx(exact_p_value((second - first).round(1).tolist()), abs=1e-12)
    assert (result.wins, result.ties, result.losses) == (
        int((second > first).sum()), int((second == first).sum()), int((second < first).sum()),
    )  # fmt: skip
    assert result.difference == pytest.approx(result.second - result.first)


def test_right_answers_follow_the_sign_test():
    first, second = [0.0] * 18 + [1.0] * 6 + [1.0] * 40, [1.0] * 18 + [0.0] * 6 + [1.0] * 40
    result = compare(first, second)
    tail = sum(math.comb(24, k) for k in range(7)) / 2**24  # 6 or fewer losses of 24
    assert result.p_value == pytest.approx(2 * tail, abs=4 * math.sqrt(2 * tail / statistics.PERMUTATIONS))
    assert (result.tasks, result.wins, result.ties, result.losses) == (64, 18, 40, 6)


def test_many_differences_follow_the_normal_distribution():
    rng = np.random.default_rng(3)
    differences = rng.normal(0.12, 1.0, 300)
    result = compare(np.zeros(300), differences)
    z = abs(differences.sum()) / math.sqrt(float((differences**2).sum()))
    assert result.p_value == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.005)
    half = 1.96 * differences.std() / math.sqrt(300)
    assert result.low == pytest.approx(differences.mean() - half, abs=0.015)
    assert result.high == pytest.approx(differences.mean() + half, abs=0.015)


def test_interval_is_that_of_all_resamples():
    differences = [-1.0, 0.0, 0.5, 2.0]
    means = sorted(sum(sample) / 4 for sample in product(differences, repeat=4))
    result = compare([0.0] * 4, differences)
    low, high = np.percentile(means, [2.5, 97.5])
    assert (result.low, result.high) == pytest.approx((low, high), abs=0.13)  # a step of the 256 resamples


def test_equal_results_have_no_difference():
    result = compare([0.2, 0.4], [0.2, 0.4])
    assert (result.difference, result.low, result.high, result.p_value, result.ties) == (0, 0, 0, 1, 2)


def test_one_task_and_large_samples_are_compared(monkeypatch):
    assert compare([0.0], [1.0]).p_value == 1.0
    whole = compare(np.zeros(40), np.arange(40.0))
    monkeypatch.setattr(statistics, "_CHUNK", 997)
    chunked = compare(np.zeros(40), np.arange(40.0))
    assert (chunked.low, chunked.high) == pytest.approx((whole.low, whole.high), abs=0.4)
    assert chunked.p_value == whole.p_value == 1 / statistics.PERMUTATIONS
    assert chunked == compare(np.zeros(40), np.arange(40.0))
