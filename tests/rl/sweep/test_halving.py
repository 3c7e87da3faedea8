"""Halving keeps the settings that are best by the mean over their seeds."""

from __future__ import annotations

import math

import pytest

from tinsmith.errors import ConfigError
from tinsmith.rl.sweep.halving import Progress, kept_settings, ranked, steps_of_halving


def at(*values: float, failed: bool = False, ended: bool = False) -> Progress:
    """A run whose metric was measured at steps 0, 10, 20, …"""
    return Progress([(10 * number, value) for number, value in enumerate(values)], ended or failed, failed)


@pytest.mark.parametrize(
    ("settings", "share", "steps", "every", "expected"),
    [
        (9, 3, 90, 10, [10, 30]),
        (4, 2, 80, 20, [20, 40]),
        (4, 2, 6, 1, [2, 3]),
        (2, 3, 30, 10, [10]),
        (8, 2, 80, 40, [40]),
        (27, 3, 10, 1, [1, 2, 4]),
    ],
)
def test_settings_end_after_powers_of_the_share(settings, share, steps, every, expected):
    assert steps_of_halving(settings, share, steps, every) == expected


@pytest.mark.parametrize(("settings", "every"), [(1, 1), (4, 0), (4, 100)])
def test_halving_that_could_end_no_run_is_refused(settings, every):
    with pytest.raises(ConfigError, match="--halve"):
        steps_of_halving(settings, 2, 20, every)


def test_no_decision_before_every_run_is_there():
    runs = {"a": [at(0, 1)], "b": [at(0)], "c": [at(0, 2)]}
    assert kept_settings(runs, 10, 3) is None
    assert kept_settings({**runs, "b": [at(0, 3)]}, 10, 3) == ["b"]


def test_settings_count_by_the_mean_over_seeds():
    runs = {"a": [at(0, 0.9), at(0, 0.1)], "b": [at(0, 0.6), at(0, 0.6)]}
    assert kept_settings(runs, 10, 2) == ["b"]
    assert kept_settings(runs, 10, 2, lower=True) == ["a"]


def test_value_is_that_of_the_step_and_not_a_later_one():
    runs = {"early": [at(0, 0.5, 0.1)], "late": [at(0, 0.4, 0.9)]}
    assert kept_settings(runs, 10, 2) == ["early"]


def test_failed_seed_does_not_count_and_failed_setting_is_last():
    runs = {"none": [at(0, 9.0, failed=True)], "part": [at(failed=True), at(0, 0.2)], "whole": [at(0, 0.1)]}
    assert kept_settings(runs, 10, 2) == ["part", "whole"]


def test_run_that_ended_before_counts_by_its_last_value():
    assert kept_settings({"done": [at(0.7, ended=True)], "on": [at(0, 0.5)]}, 10, 2) == ["done"]


def test_values_that_are_no_number_are_last():
    assert ranked({"nan": math.nan, "a": 1.0, "b": 1.0, "c": -math.inf}) == ["a", "b", "c", "nan"]
    assert ranked({"nan": math.nan, "a": 1.0, "c": -math.inf}, lower=True) == ["c", "a", "nan"]
