"""A run folder read back: while the run goes on, when it has ended in any way, and from a copy."""

from __future__ import annotations

import fcntl
import math
import shutil
from pathlib import Path

import pytest

from tests.rl.scripted_run import run, settings
from tinsmith.errors import ConfigError
from tinsmith.rl.history import RunHistory, find_runs
from tinsmith.rl.history.metric_table import MetricTable
from tinsmith.rl.record.layout import Layout
from tinsmith.rl.run.folder import RunFolder

LINE = "2026-11-21 16:00:00,123 {} tinsmith.rl.run.loop: {}\n"


def test_finished_run_is_read_back_from_a_copy(tmp_path: Path) -> None:
    run(settings(tmp_path / "run", steps=2))
    shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=shutil.copyfile)
    history = RunHistory.open(tmp_path / "copy")
    assert (history.name, history.step_count, history.status.condition, history.status.step) == (
        "small",
        2,
        "finished",
        2,
    )
    assert history.metrics.steps == [0, 1, 2]
    assert [row["step"] for row in history.metrics.evaluations()] == [0, 2]
    assert history.comparison[0]["measure"] == "pass@1"
    assert {span.part for span in history.timeline} >= {"sampling", "training"}
    assert history.rollouts.find().total == 2 * 12 + 2 * 5
    assert {each.path for each in find_runs(tmp_path)} == {tmp_path / "run", tmp_path / "copy"}


@pytest.mark.parametrize(
    ("log", "condition", "reason"),
    [
        ([], "died", ""),
        ([("INFO", "small: starting at step 1 of 8, in x")], "died", ""),
        ([("INFO", "Stopped by Ctrl-C after step 1 of 8")], "stopped", "Ctrl-C after step 1 of 8"),
        ([("ERROR", "The run was stopped by ConfigError: no disk")], "died", "ConfigError: no disk"),
        ([("ERROR", "The run was stopped by KeyboardInterrupt: ")], "stopped", "KeyboardInterrupt: "),
        ([("INFO", "Stopped by Ctrl-C after step 1"), ("INFO", "x: starting at step 2 of 8")], "died", ""),
        ([("INFO", "Finished: 8 steps; final weights: tinker://x")], "finished", ""),
        ([("INFO", "a task says: Finished: all")], "died", ""),
    ],
)
def test_log_says_how_a_run_ended(tmp_path: Path, log: list[tuple[str, str]], condition: str, reason: str) -> None:
    Layout(tmp_path).metrics.write_text('{"step": 1, "reward/mean": null}\n{"step": 2, "rew')
    Layout(tmp_path).log.write_text("".join(LINE.format(*entry) for entry in log))
    status = RunHistory(tmp_path).status
    assert (status.condition, status.reason, status.step) == (condition, reason, 1)


def test_locked_run_is_running_and_readers_do_not_lock_it(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, {"name": "small"})
    assert RunHistory.open(tmp_path).status.condition == "running"
    folder.close()
    assert RunHistory.open(tmp_path).status.condition == "new"
    with Layout(tmp_path).lock("").open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        with pytest.raises(ConfigError, match="Another process is using"):
            RunFolder.open(tmp_path, {"name": "small"})
    RunFolder.open(tmp_path, {"name": "small"}).close()


def test_parts_and_stages_are_runs_of_their_own(tmp_path: Path) -> None:
    run_folder = Layout(tmp_path / "deep" / "run")
    for folder in (
        run_folder.path,
        run_folder.part("bench").path,
        run_folder.stage(1, "sft"),
        run_folder.stage(2, "rl"),
    ):
        folder.mkdir(parents=True)
        Layout(folder).settings.write_text("name: staged\n")
    run_folder.stages.write_text('{"stages": ["sft", "rl"], "under_way": "rl", "ended": {"sft": "tinker://x"}}')
    (history,) = find_runs(tmp_path)
    assert history.path == run_folder.path
    assert list(history.parts) == ["bench"]
    assert [stage.path.name for stage in history.stages] == ["01-sft", "02-rl"]


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no run in"):
        RunHistory.open(tmp_path)
    Layout(tmp_path).settings.write_bytes(b"name: \xff [")
    assert RunHistory.open(tmp_path).settings == {}


def test_table_has_none_for_what_is_missing_or_not_finite() -> None:
    table = MetricTable([{"step": 1, "a": 0.5}, {"step": 2, "a": math.nan, "b": math.inf}])
    assert table.columns() == {"step": [1, 2], "a": [0.5, None], "b": [None, None]}
    assert (table.last("a"), table.last("b"), table.last("c")) == (0.5, None, None)
