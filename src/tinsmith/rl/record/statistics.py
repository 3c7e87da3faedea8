"""Paired statistics: the difference between two results for each task, its confidence interval and its p-value.

Tasks are the sample: answers to one task are averaged first. The interval is a percentile bootstrap over tasks. The
test flips the sign of each difference at random; its null hypothesis is that both results of a task have the same
distribution.

Dimensions: T tasks, D tasks with a difference, B draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BOOTSTRAP_DRAWS = 10_000
PERMUTATIONS = 50_000
CONFIDENCE = 0.95
_CHUNK = 4_000_000
"""Largest number of random values in memory at a time."""
_ROUNDING = 1e-12
"""Relative difference below which two sums are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedComparison:
    """Results of a second model minus those of a first one, on the same tasks.

    Example: PairedComparison(tasks=100, first=0.2, second=0.5, difference=0.3, low=0.2, high=0.4, p_value=2e-5,
    wins=35, ties=60, losses=5)
    """

    tasks: int
    first: float
    """Mean result of the first model."""
    second: float
    """Mean result of the second model."""
    difference: float
    """`second` - `first`."""
    low: float
    """Lower end of the 95 % confidence interval of the difference."""
    high: float
    """Upper end of the interval."""
    p_value: float
    """Two-sided p-value of the permutation test; exact if there are few differences."""
    wins: int
    """Tasks where the second result is higher."""
    ties: int
    losses: int


def compare(first: Sequence[float], second: Sequence[float], seed: int = 0) -> PairedComparison:
    """Compare results [T] of two models on the same tasks, T > 0. The same seed gives the same numbers."""
    first_T, second_T = np.asarray(first, np.float64), np.asarray(second, np.float64)
    differences_T = second_T - first_T
    low, high = interval_of_mean(differences_T, seed)
    return PairedComparison(
        tasks=len(differences_T),
        first=float(first_T.mean()),
        second=float(second_T.mean()),
        difference=float(differences_T.mean()),
        low=low,
        high=high,
        p_value=_permutation_p_value(differences_T, seed),
        wins=int((differences_T > 0).sum()),
        ties=int((differences_T == 0).sum()),
        losses=int((differences_T < 0).sum()),
    )


def interval_of_mean(values: Sequence[float] | np.ndarray, seed: int = 0) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of values [T], T > 0."""
    values_T = np.asarray(values, np.float64)
    rng, size = np.random.default_rng((seed, 0)), len(values_T)
    means: list[np.ndarray] = []
    for draws in _chunks(BOOTSTRAP_DRAWS, size):
        means.append(values_T[rng.integers(0, size, (draws, size))].mean(axis=1))
    tail = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(np.concatenate(means), [tail, 100.0 - tail])
    return float(low), float(high)


def _permutation_p_value(differences_T: np.ndarray, seed: int) -> float:
    """Share of sign flips whose sum is at least as far from 0 as the observed one.

    If there are no more than PERMUTATIONS flips, all are counted; else the observed signs count as one of those drawn.
    """
    differences_D = differences_T[differences_T != 0]
    observed = abs(differences_D.sum()) - _ROUNDING * np.abs(differences_D).sum()
    if 2 ** len(differences_D) <= PERMUTATIONS:
        sums = np.zeros(1)
        for difference in differences_D:
            sums = np.concatenate([sums + difference, sums - difference])
        return float((np.abs(sums) >= observed).mean())
    rng, extreme = np.random.default_rng((seed, 1)), 1
    for draws in _chunks(PERMUTATIONS - 1, len(differences_D)):
        signs_BD = 1.0 - 2.0 * rng.integers(0, 2, (draws, len(differences_D)))
        extreme += int((np.abs(signs_BD @ differences_D) >= observed).sum())
    return extreme / PERMUTATIONS


def _chunks(total: int, width: int) -> list[int]:
    """Row counts that add up to `total`, each of at most _CHUNK values in rows of `width`."""
    size = max(1, _CHUNK // width)
    return [min(size, total - begin) for begin in range(0, total, size)]
