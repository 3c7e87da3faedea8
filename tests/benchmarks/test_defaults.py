"""The benchmark of the defaults: its run files are valid, and its table says what its runs measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.defaults import __main__ as benchmark
from benchmarks.defaults.rows import write_rows
from tinsmith.dialects import read_run


@pytest.mark.parametrize("name", benchmark.KINDS)
def test_run_files_set_no_more_than_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)
    run = read_run(benchmark.HERE / f"{name}.yaml", ()).settings
    task = {"model", "tasks", "rewards", "sampling", "steps", "plugins", "algorithm", "demonstrations", "name"}
    assert run.model_fields_set <= task
    assert run.model.model_fields_set == {"name"}
    assert run.sampling.model_fields_set == {"max_tokens"}


def test_outcome_is_that_of_the_last_evaluation(tmp_path: Path) -> None:
    evaluation = {"eval/tasks": 100.0, "eval/constant_reward": 0.2}
    rows = [
        {"step": 0, "eval/reward/mean": 0.1, **evaluation},
        {"step": 1, "reward/mean": 0.1, "time/step": 60.0},
        {"step": 1, "eval/reward/mean": 0.5, **evaluation},
        {"step": 2, "reward/mean": 0.3, "time/step": 60.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    assert benchmark.outcome("dates", tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = benchmark.outcome("dates", tmp_path)
    assert outcome is not None
    assert outcome.learned
    assert (outcome.before, outcome.after, outcome.constant) == (0.1, 0.5, 0.2)
    assert (outcome.steps, outcome.minutes) == (1, 1.0)
