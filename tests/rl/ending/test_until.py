"""Runs and stages that end by a metric or by time: a real end, with final weights and after a resume too."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from tests.rl.scripted_run import rows, run, scripted, settings
from tinsmith.rl.config import RunConfig
from tinsmith.rl.ending.stop import StopSignal
from tinsmith.rl.ending.until import EndCondition, UntilConfig
from tinsmith.rl.stages import run_stages


def condition(state=None, clock=lambda: 0.0, **config) -> EndCondition:
    return EndCondition(UntilConfig(**config), state or {}, clock)


def test_condition_holds_from_its_bound_on():
    up, down = condition(metric="a", at_least=0.5), condition(metric="a", at_most=0.5)
    assert "never measured" in up.fault
    for value, rising, falling in ((0.4, False, True), (0.6, True, False), (0.5, True, True)):
        up.observe({"a": value, "b": 9.0})
        down.observe({"a": value})
        assert (bool(up.reason), bool(down.reason)) == (rising, falling)
    assert up.reason == "a is 0.5, at least 0.5"


def test_patience_counts_values_without_improvement():
    values, ended = [0.1, 0.3, 0.3, 0.2, 0.4, 0.4, 0.1, 0.2], []
    state: dict[str, float] = {}
    for value in values:
        each = condition(state, metric="a", at_least=1.0, patience=3)  # from the state of a checkpoint each time
        each.observe({"a": value})
        state = each.state
        ended.append(bool(each.reason))
    assert ended == [False] * 7 + [True]
    each.observe({"b": 1.0})
    assert each.reason == "a has not been better than 0.4 for 3 values"


@pytest.mark.parametrize(("better", "ends"), [(None, False), ("higher", False), ("lower", True)])
def test_patience_needs_no_bound(better, ends):
    until = condition(metric="a", patience=2, better=better)
    for value in (0.1, 0.2, 0.3):
        until.observe({"a": value})
    assert bool(until.reason) == ends


def test_time_adds_up_over_resumes():
    now = [0.0]
    first = condition(clock=lambda: now[0], time_limit="1m")
    now[0] = 45.0
    assert not first.reason
    second = condition(first.state, clock=lambda: now[0], time_limit="1m")
    now[0] = 59.0
    assert not second.reason
    now[0] = 60.0
    assert second.reason == "its time limit of 60 seconds is over"


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({}, "there is no condition"),
        ({"metric": "a"}, "metric needs a condition; set at_least, at_most or patience"),
        ({"metric": "a", "at_most": 1, "patience": 2, "better": "higher"}, "better: higher contradicts at_most"),
        ({"metric": "a", "at_least": 1, "better": "lower"}, "better is not used without patience"),
        ({"metric": "a", "at_least": 1, "at_most": 0}, "at_least and at_most are two bounds"),
        ({"at_least": 1, "time_limit": 5}, "at_least is not used without metric"),
        ({"time_limit": 0}, "greater than 0"),
    ],
)
def test_conditions_without_effect_are_refused(config, match):
    with pytest.raises(ValidationError, match=match):
        UntilConfig(**config)


def test_run_ends_when_its_metric_is_reached(tmp_path):
    config = settings(tmp_path, steps=40, until={"metric": "eval/pass@1", "at_least": 1.0}, eval={"every": 5})
    state = run(config)
    measured = [(row["step"], row["eval/pass@1"]) for row in rows(tmp_path) if "eval/pass@1" in row]
    assert state.step == measured[-1][0] < 40
    assert [value >= 1.0 for _, value in measured[1:]] == [False] * (len(measured) - 2) + [True]
    assert state.sampling_path
    assert run(config, connect=None) == state  # it is finished
    further = config.model_copy(update={"until": None, "steps": state.step + 1})
    assert run(further).step == state.step + 1


def test_end_between_evaluations_is_evaluated(tmp_path):
    state = run(settings(tmp_path, steps=40, until={"metric": "reward/mean", "at_least": 0.9}, eval={"every": 50}))
    steps = [row["step"] for row in rows(tmp_path) if "eval/pass@1" in row]
    assert steps == [0, state.step]
    assert 1 < state.step < 40


def test_metric_that_is_never_measured_is_reported(tmp_path):
    run(settings(tmp_path, until={"metric": "reward/average", "at_least": 0.9}))
    assert "until.metric: reward/average was never measured. Did you mean 'reward/mean'?" in log_of(tmp_path)


@pytest.mark.parametrize("evaluations", [{"every": 100}, {"every": 2}, {"every": 100, "before": False}])
def test_metric_of_the_last_evaluation_is_measured(tmp_path, evaluations):
    run(settings(tmp_path, steps=3, until={"metric": "eval/pass@1", "at_least": 2.0}, eval=evaluations))
    assert [row["step"] for row in rows(tmp_path) if "eval/pass@1" in row][-1] == 3
    assert "measured" not in log_of(tmp_path)


def test_metric_without_a_number_is_measured():
    until = condition(metric="a", at_least=1.0)
    until.observe({"a": math.nan})
    assert until.fault == "until.metric: a was never a number, so the run could not end by it"
    assert condition(until.state, metric="a", at_least=1.0).fault == until.fault
    until.observe({"a": 0.5})
    assert not until.fault
    assert not condition(until.state, metric="a", at_least=1.0).fault


def log_of(folder: Path) -> str:
    file = folder / "log.txt"
    return file.read_text() if file.exists() else ""


def test_evaluation_metric_without_evaluations_is_refused(tmp_path):
    with pytest.raises(ValidationError, match="eval/pass@1 is never measured"):
        settings(tmp_path, until={"metric": "eval/pass@1", "at_least": 1}, eval={"every": 0})


def test_stage_ends_by_metric_and_the_next_continues(tmp_path):
    until = {"metric": "reward/mean", "at_least": 0.9}
    stages = [{"name": "easy", "steps": 30, "until": until}, {"name": "hard", "steps": 2}]
    config = settings(tmp_path / "run", stages=stages, steps=0, eval={"every": 0, "before": False, "after": False})

    def go(config: RunConfig, stop: StopSignal):
        connecting = lambda stage: scripted(tmp_path / stage.name.rpartition(" ")[2])  # noqa: E731
        return asyncio.run(run_stages(config, connecting, Console(quiet=True), stop))

    stop = StopSignal()
    stage, state = go(config, stop)
    ended = json.loads((tmp_path / "run" / "stages.json").read_text())["ended"]
    first = json.loads((tmp_path / "run" / "01-easy" / "state.json").read_text())
    assert first["step"] < 30
    assert first["path"] == ended["easy"] == stage.model.load_from
    assert (stage.name, state.step, stop.stopped_at) == ("small hard", 2, "")
    assert go(config, StopSignal())[1] == state


def test_stop_in_a_stage_is_continued_there(tmp_path):
    stages = [{"name": "first", "steps": 3}, {"name": "second", "steps": 3}]
    config = settings(tmp_path / "run", stages=stages, steps=0)
    for limit, expected in ((0.0, ("small first", 0)), (None, ("small second", 3))):
        connecting = lambda stage: scripted(tmp_path / stage.name.rpartition(" ")[2])  # noqa: E731
        stop = StopSignal(limit)
        stage, state = asyncio.run(run_stages(config, connecting, Console(quiet=True), stop))
        assert (stage.name, state.step) == expected
        assert bool(stop.stopped_at) == (limit is not None)


def test_stage_refuses_a_time_limit_of_its_own(tmp_path):
    with pytest.raises(ValidationError, match=r"time_limit cannot differ between stages.*until.time_limit"):
        settings(tmp_path, stages=[{"name": "a", "time_limit": 5}], steps=0)


def test_time_limit_of_an_explorer_is_refused(tmp_path):
    with pytest.raises(ValidationError, match="time_limit is not used with mode explore"):
        settings(tmp_path, mode="explore", time_limit=5, buffer={"type": "file"})
