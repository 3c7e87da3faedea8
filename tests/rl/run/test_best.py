"""`checkpoint.keep: best` keeps the checkpoint with the best evaluation, and its weights are the result."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from tests.rl.scripted_run import run, scripted, settings
from tinsmith.rl.config import RunConfig
from tinsmith.rl.config.checkpoints import CheckpointConfig
from tinsmith.rl.ending.stop import StopSignal
from tinsmith.rl.evaluate import Evaluation, Evaluator
from tinsmith.rl.run.best import BestSoFar
from tinsmith.rl.stages import run_stages

METRIC = "eval/reward/mean"
REWARDS = {0: 0.9, 2: 0.1, 4: 0.7, 6: 0.7, 8: 0.2}
"""Of the evaluation after each step: those of steps 4 and 6 are equal, and the first weights are no checkpoint."""


@pytest.fixture(autouse=True)
def rewards(monkeypatch) -> dict[int, float]:
    """The held-out reward after each step, in place of what is measured."""
    values, measure = dict(REWARDS), Evaluator.run

    async def measured(self: Evaluator, step: int, policy: Any) -> Evaluation:
        evaluation = await measure(self, step, policy)
        return replace(evaluation, values={**evaluation.values, METRIC: values.get(step, 0.0)})

    monkeypatch.setattr(Evaluator, "run", measured)
    return values


def best(folder: Path, **changes: Any) -> RunConfig:
    return settings(folder, eval={"every": 2}, checkpoint={"every": 3, "keep": "best"}, **changes)


def test_best_weights_are_the_result(tmp_path):
    state = run(best(tmp_path))
    assert state.best is not None
    assert (state.step, state.best.step, state.best.value) == (8, 4, 0.7)
    assert state.sampling_path == state.best.sampling_path
    assert [paths[0] for paths in state.checkpoints] == [state.best.path, state.path]
    weights = {path.name for path in (tmp_path / "weights").iterdir()}
    assert not {name for name in weights if "000002" in name or "000003" in name}, weights
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    assert {row["second"] for row in comparison} == {"step 4"}


def test_lower_is_better_where_it_is_said(tmp_path):
    config = best(tmp_path).model_copy(update={"checkpoint": CheckpointConfig(keep="best", better="lower")})
    state = run(config)
    assert state.best is not None
    assert (state.best.step, state.best.value) == (2, 0.1)


def test_last_step_may_be_the_best(tmp_path, rewards):
    rewards[8] = 0.8
    state = run(best(tmp_path))
    assert state.best is not None
    assert (state.best.step, state.best.path) == (8, state.path)
    assert state.checkpoints == ((state.path,),)


@pytest.mark.parametrize("stop_after", [3, 4, 5])
def test_resumed_run_has_the_same_best(tmp_path, stop_after):
    expected = run(best(tmp_path / "whole"))
    run(best(tmp_path / "parts", steps=stop_after))
    state = run(best(tmp_path / "parts"))
    assert state.best is not None
    assert expected.best is not None
    assert (state.best.step, state.best.value) == (expected.best.step, expected.best.value)


def test_next_stage_begins_with_the_best(tmp_path):
    stages = [{"name": "one", "steps": 8}, {"name": "two", "steps": 2}]
    config = best(tmp_path / "run", stages=stages)
    connecting = lambda stage: scripted(tmp_path / stage.name.rpartition(" ")[2])  # noqa: E731
    stage, _ = asyncio.run(run_stages(config, connecting, Console(quiet=True), StopSignal()))
    first = json.loads((tmp_path / "run" / "01-one" / "state.json").read_text())
    assert stage.model.load_from == first["best"]["path"] != first["path"]


def test_metric_without_numbers_leaves_the_last_weights():
    so_far = BestSoFar(CheckpointConfig(keep="best", metric="eval/other"), None)
    so_far.observe({METRIC: 1.0, "eval/other": float("nan")})
    assert so_far.unsaved is None


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"checkpoint": {"keep": "best"}, "eval": {"every": 0, "after": False}}, "keep: best needs evaluations"),
        ({"checkpoint": {"keep": "best", "metric": "reward/mean"}}, "reward/mean is no metric of evaluations"),
        ({"checkpoint": {"metric": "eval/pass@1"}}, "metric is not used .* keep"),
        ({"checkpoint": {"keep": "newest"}}, "best"),
    ],
)
def test_best_without_evaluations_is_refused(tmp_path, changes, error):
    with pytest.raises(ValidationError, match=error):
        settings(tmp_path, **changes)
