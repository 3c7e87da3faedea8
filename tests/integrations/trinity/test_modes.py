"""Modes, and buffers of rollouts: memory, or a folder or a database that two processes share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trinity.examples import EVALUATED, LEARNED, OWN
from tests.integrations.trinity.files import read
from tinsmith.errors import ConfigError
from tinsmith.rl.data.sources import Sql
from tinsmith.rl.rollouts.buffer import FileConfig, MemoryConfig, SqlConfig

NO_TASKSET = ("buffer.explorer_input.taskset", None)
TASKSET = "buffer.explorer_input.taskset"


@pytest.mark.parametrize(("mode", "ours"), [("both", "both"), ("colocate", "both"), ("explore", "explore")])
def test_mode_is_translated(mode: str, ours: str, tmp_path: Path):
    assert read(tmp_path, ("mode", mode)).settings.mode == ours


def test_mode_train_needs_no_tasks(tmp_path: Path):
    run = read(tmp_path, *LEARNED, NO_TASKSET, ("trainer.total_steps", 7)).settings
    assert (run.mode, run.tasks.sources, run.steps, run.epochs) == ("train", (), 3, None)
    assert (run.groups_per_step, run.group_size, run.updates.minibatches) == (4, 4, 2)
    run = read(tmp_path, *LEARNED, NO_TASKSET, ("buffer.total_steps", None), ("trainer.total_steps", 7)).settings
    assert (run.steps, run.epochs) == (3, None)  # of two training steps of Trinity each


def test_two_processes_share_a_folder_or_a_database(tmp_path: Path):
    buffers: list[tuple[dict[str, Any], Any]] = [
        ({}, FileConfig()),
        ({"storage_type": "file"}, FileConfig()),
        ({"storage_type": "file", "path": "some/rollouts.jsonl"}, FileConfig(path="some/rollouts")),
        ({"storage_type": "sql", "path": "postgresql://a/b"}, SqlConfig(url="postgresql+psycopg://a/b")),
        (
            {"storage_type": "sql", "name": "meet"},
            SqlConfig(url="sqlite:///out/Trinity-RFT/small/buffer.db", run="meet"),
        ),
    ]
    for buffer, ours in buffers:
        explore = read(tmp_path, ("mode", "explore"), (OWN, buffer)).settings
        train = read(tmp_path, *LEARNED, (OWN, buffer)).settings
        assert explore.buffer == train.buffer == ours
        assert explore.folder == train.folder


def test_single_process_buffers_in_memory_by_default(tmp_path: Path):
    assert read(tmp_path, (OWN, {"name": "queue", "storage_type": "queue"})).settings.buffer == MemoryConfig()
    queue = read(tmp_path, (OWN, {"path": "sqlite:///queue.db"}))
    assert queue.settings.buffer == MemoryConfig()
    assert any("Trinity copies its queue there" in note for note in queue.notes)
    assert isinstance(read(tmp_path, (OWN, {"storage_type": "file"})).settings.buffer, FileConfig)


def test_replay_buffer_is_translated(tmp_path: Path):
    options = {"enable": True, "reuse_cooldown_time": 5, "priority_fn_args": {"decay": 1.5}}
    plain = read(tmp_path, (OWN, {"replay_buffer": options, "capacity": 9})).settings.buffer.replay
    assert (plain.enable, plain.priority, plain.decay, plain.cooldown, plain.size) == (
        True,
        "linear_decay",
        1.5,
        5.0,
        9,
    )
    for name in ("decay_limit_randomization", "linear_decay_use_count_control_randomization"):
        limited = {**options, "priority_fn": name, "priority_fn_args": {"use_count_limit": 2, "sigma": 0.5}}
        replay = read(tmp_path, (OWN, {"replay_buffer": limited})).settings.buffer.replay
        assert (replay.priority, replay.decay, replay.limit, replay.sigma) == ("linear_decay_limited", 2.0, 2, 0.5)
    off = read(tmp_path, (OWN, {"replay_buffer": {"enable": False, "priority_fn": "x"}}))
    assert any("it has an effect only with enable: true" in note for note in off.notes)


def test_max_staleness_is_translated(tmp_path: Path):
    bounded = (
        ("algorithm.sample_strategy", "staleness_control"),
        ("algorithm.sample_strategy_args", {"max_staleness": 2}),
        ("synchronizer", {"sync_style": "fully_async", "sync_offset": 3}),
    )
    assert read(tmp_path, *bounded).settings.buffer.max_staleness == 2
    with pytest.raises(ConfigError, match="is not a number of steps"):
        read(tmp_path, *bounded, ("algorithm.sample_strategy_args", {"max_staleness": -1}))


def test_read_timeout_applies_in_mode_train(tmp_path: Path):
    train = read(tmp_path, *LEARNED, (OWN, {"max_read_timeout": 60}), ("synchronizer.sync_timeout", 5))
    assert train.settings.sync.timeout == 60
    synchronous = read(tmp_path, (OWN, {"max_read_timeout": 60, "capacity": 5}), ("synchronizer.sync_timeout", 7))
    assert synchronous.settings.sync.timeout == 7
    assert sum("max_read_timeout: it has an effect in mode train" in note for note in synchronous.notes) == 1
    assert sum("with sync_style fixed" in note for note in synchronous.notes) == 1


def test_bench_evaluates_base_model_and_checkpoints(tmp_path: Path):
    settings = read(tmp_path, *EVALUATED, ("mode", "bench"), NO_TASKSET).settings
    assert (settings.mode, settings.bench.of_run, settings.bench.base) == ("bench", "all", True)
    assert settings.eval.workflow is not None
    latest = {"bench_on_latest_checkpoint": True, "eval_on_startup": False}
    settings = read(tmp_path, *EVALUATED, ("mode", "bench"), ("explorer", latest)).settings
    assert (settings.bench.of_run, settings.bench.base) == ("last", False)
    learned = read(tmp_path, *EVALUATED, ("mode", "bench"), ("algorithm.algorithm_type", "sft")).settings
    assert learned.mode == "bench"


def test_mode_explore_ignores_eval_tasksets_with_a_note(tmp_path: Path):
    run_file = read(tmp_path, *EVALUATED, ("mode", "explore"))
    assert not run_file.settings.evaluates
    assert any("the process of mode train evaluates" in note for note in run_file.notes)


def test_database_urls_use_the_installed_driver(tmp_path: Path):
    taskset = {"storage_type": "sql", "name": "rows", "path": "postgresql://me@here/tasks"}
    (source,) = read(tmp_path, (TASKSET, taskset)).settings.tasks.sources
    assert isinstance(source, Sql)
    assert (source.url, source.table) == ("postgresql+psycopg://me@here/tasks", "rows")


def test_name_of_an_explorer_is_that_of_a_process(tmp_path: Path):
    assert read(tmp_path, ("mode", "explore"), ("explorer.name", "b_2")).settings.sampler == "b_2"
    assert read(tmp_path, ("mode", "explore"), ("explorer.name", "explorer")).settings.sampler == ""
    assert read(tmp_path, ("explorer.name", "b_2")).settings.sampler == ""
    with pytest.raises(ConfigError, match="'b 2' is part of names of files"):
        read(tmp_path, ("mode", "explore"), ("explorer.name", "b 2"))
