"""A run's log file, and what `tinsmith log` shows of it."""

from __future__ import annotations

import logging
import threading

import pytest

from tests.rl.scripted_run import run, scripted, settings
from tinsmith.cli.log import log
from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.rl.record import logs
from tinsmith.rl.record.layout import Layout
from tinsmith.rl.run.parts import with_fresh_folder


def test_log_has_every_step_and_the_end(finished):
    entries = logs.read(finished)
    assert "starting at step 1 of 8" in entries[0]
    assert sum("Step 3 of 8: reward" in entry for entry in entries) == 1
    assert "Finished: 8 steps" in entries[-1]


def test_log_has_the_error_that_ended_the_run(tmp_path):
    with pytest.raises(TinsmithError):
        run(settings(tmp_path, rewards=[{"type": "reasoning_gym"}]))
    assert "stopped by TinsmithError: Every rollout of step 1 failed" in logs.read(tmp_path, level="ERROR")[0]

    async def connect(state, version):
        raise ZeroDivisionError("our fault")

    with pytest.raises(ZeroDivisionError):
        run(settings(tmp_path / "other"), connect)
    (entry,) = logs.read(tmp_path / "other")
    assert "Traceback" in entry
    assert entry.endswith("ZeroDivisionError: our fault")


def test_log_level_omits_lower_levels(tmp_path):
    run(settings(tmp_path, steps=1, log_level="WARNING"))
    file = Layout(tmp_path).log
    assert not file.exists() or not file.read_text()


def test_resumed_run_appends_to_its_log_and_restores_logging(tmp_path):
    before = list(logging.getLogger().handlers), logging.getLogger("tinsmith").level
    run(settings(tmp_path, steps=2))
    run(settings(tmp_path, steps=3))
    steps = [entry.partition("Step ")[2][:1] for entry in logs.read(tmp_path, keyword="REWARD")]
    assert steps == ["1", "2", "3"]
    assert (list(logging.getLogger().handlers), logging.getLogger("tinsmith").level) == before


def test_keyword_level_and_last_select_entries(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    with logs.log_to_folder(folder):
        ours = logging.getLogger("tinsmith.rl.test")
        ours.info("first")
        ours.warning("second\nwith a line more")
        ours.info("third of the second kind")
    assert len(logs.read(folder)) == 3
    assert logs.read(folder, level="WARNING")[0].endswith("second\nwith a line more")
    assert [entry[-4:] for entry in logs.read(folder, keyword="second", last=1)] == ["kind"]
    monkeypatch.chdir(tmp_path)
    log(last=1)
    assert capsys.readouterr().out.endswith("INFO tinsmith.rl.test: third of the second kind\n")
    with pytest.raises(ConfigError, match=r"no log\.txt in"):
        log(tmp_path)


def test_rotated_files_are_read_first(tmp_path):
    (tmp_path / "log.txt.1").write_text("2026-01-01 00:00:00,000 INFO tinsmith: old\n")
    (tmp_path / "log.txt").write_text("2026-01-02 00:00:00,000 INFO tinsmith: new\n")
    assert [entry[-3:] for entry in logs.read(tmp_path)] == ["old", "new"]


def test_follow_yields_only_new_entries(tmp_path):
    file = tmp_path / "log.txt"
    file.write_text("2026-01-01 00:00:00,000 INFO tinsmith: before\n")
    entries = logs.follow(tmp_path, keyword="now")

    def write():
        with file.open("a") as lines:
            lines.write("2026-01-01 00:00:01,000 INFO tinsmith: other\n2026-01-01 00:00:02,000 INFO tinsmith: now\n")

    writer = threading.Timer(0.2, write)
    writer.start()
    assert next(entries).endswith("now")
    writer.join()


@pytest.mark.parametrize("keep", [0, 2])
def test_keep_bounds_stored_checkpoints(tmp_path, keep):
    deleted = []

    async def connect(state, version):
        policy = await scripted(tmp_path)(state, version)

        async def delete_checkpoint(path):
            deleted.append(path)

        policy.delete_checkpoint = delete_checkpoint
        return policy

    run(settings(tmp_path, steps=4, checkpoint={"every": 1, "keep": keep}), connect)
    state = run(settings(tmp_path, steps=8, checkpoint={"every": 1, "keep": keep}), connect)
    assert len(state.checkpoints) == (keep or 8)
    assert state.checkpoints[-1] == (state.path,)
    assert len(deleted) == (8 - keep if keep else 0)
    assert not {path for paths in state.checkpoints for path in paths} & set(deleted)


def test_resume_rename_starts_a_run_in_a_new_folder(tmp_path):
    folder = tmp_path / "run"
    run(settings(folder, steps=1))
    before = (folder / "metrics.jsonl").read_text()
    again = settings(folder, steps=2, group_size=5, resume="rename")
    with pytest.raises(ConfigError, match="already holds a run"):
        run(again)
    run(with_fresh_folder(again))
    assert (folder / "metrics.jsonl").read_text() == before
    (new,) = [path for path in tmp_path.iterdir() if path != folder and path.name.startswith("run_")]
    assert len(new.name) == len("run_20261121160000")
    assert (new / "state.json").exists()
