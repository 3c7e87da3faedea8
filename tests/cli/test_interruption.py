"""Ctrl-C and early stops print how to resume a run, and nothing about resuming in commands without a run."""

from __future__ import annotations

import fcntl
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from rich.console import Console

from tests.cli.test_commands import (
    PACE,
    RUN_FILE,
    STEPS,
    environment,
    error_of,
    metrics,
    run_and_send,
    tinsmith,
    wait_for,
)
from tests.rl.scripted_run import settings
from tinsmith.cli import STOPPED_EARLY
from tinsmith.cli.runner import train
from tinsmith.rl.run.state import RandomStates, State, write_state

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """Working directory with a run file."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "small.yaml").write_text(RUN_FILE.replace("source: tiny", f"source: {tiny_llama}"))
    (folder / "pace.py").write_text(PACE)
    return folder


def test_interrupted_run_saves_and_prints_how_to_resume(work):
    assert run_and_send(work, signal.SIGINT, "runs/interrupted") == 0
    text = (work / "log").read_text()
    assert "Ctrl-C: the run stops after this step and saves a checkpoint; Ctrl-C again ends it at once" in text
    assert "small: stopped by Ctrl-C after step" in text
    assert "The same command continues from there." in " ".join(text.split())
    assert "Traceback" not in text


HANGING = """
import asyncio
from tinsmith.rl.plugins import workflow

@workflow("hanging")
async def hanging(task, conversation):
    await conversation.say(*task.messages)
    print("hangs now", flush=True)
    while True:
        try:
            await asyncio.sleep(60)
        except BaseException:
            pass
"""


def test_second_ctrl_c_ends_at_once_and_leaves_nothing_running(work):
    (work / "plugins").mkdir()
    (work / "plugins" / "hanging.py").write_text(HANGING)
    changes = ["folder=runs/ended", "plugins=plugins", "workflow={type: hanging}", "eval={every: 0, before: false}"]
    with (work / "ended.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tinsmith", "run", "small.yaml", *changes],
            cwd=work,
            stdout=log,
            stderr=log,
            env=environment(),
        )
        for text in ("hangs now", "Ctrl-C again"):
            wait_for(lambda text=text: text in (work / "ended.log").read_text(), work / "ended.log")
            process.send_signal(signal.SIGINT)
        assert process.wait(100) == 130
    assert "tried to end the run" not in (work / "ended.log").read_text()
    with (work / "runs" / "ended" / "service" / "lock").open() as lock:
        wait_for(lambda: _is_free(lock), work / "ended.log")


def _is_free(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_interrupted_run_names_its_folder_with_resume_rename(work):
    assert run_and_send(work, signal.SIGINT, "runs/renamed", "resume=rename") == 0
    words = "folder=runs/renamed resume=true"
    assert f"The same command with {words} continues" in " ".join((work / "log").read_text().split())
    again = tinsmith(work, "run", "small.yaml", "resume=rename", *words.split())
    assert again.returncode == 0, again.stderr
    assert [row["step"] for row in metrics(work / "runs" / "renamed") if "reward/mean" in row] == list(
        range(1, STEPS + 1)
    )


def test_terminated_run_exits_with_75_and_is_continued(work):
    assert run_and_send(work, signal.SIGTERM, "runs/terminated") == STOPPED_EARLY == 75
    text = " ".join((work / "log").read_text().split())
    assert "small: stopped by SIGTERM after step" in text
    assert "The same command continues from there." in text
    again = tinsmith(work, "run", "small.yaml", "folder=runs/terminated")
    assert again.returncode == 0, again.stderr
    assert re.search(rf"continuing at step \d+ of {STEPS}", again.stdout)
    steps = [row["step"] for row in metrics(work / "runs" / "terminated") if "reward/mean" in row]
    assert steps == list(range(1, STEPS + 1))


def test_time_limit_of_the_command_stops_the_run(work):
    words = ("run", "small.yaml", "folder=runs/limited", "resume=rename", "--time-limit", "0.01s")
    stopped = tinsmith(work, *words)
    assert stopped.returncode == STOPPED_EARLY, stopped.stderr
    assert f"stopped by its time limit after step 0 of {STEPS}" in " ".join(stopped.stderr.split())
    assert "with folder=runs/limited resume=true continues" in " ".join(stopped.stderr.split())


def test_interruption_says_from_where_the_command_resumes(tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tinsmith.runner.run_to_end", interrupted)
    run = settings(tmp_path)
    with pytest.raises(KeyboardInterrupt, match=r"^the same command starts again: no checkpoint was saved yet$"):
        train(run, Console(quiet=True))
    state = State(step=3, version=3, cursor=6, path="tinker://x/weights/step-000003", random=RandomStates.capture())
    write_state(tmp_path / "state.json", state)
    with pytest.raises(KeyboardInterrupt, match=r"^the same command resumes from the last checkpoint, after step 3$"):
        train(run, Console(quiet=True))


def test_interrupted_check_prints_nothing_about_resuming(capsys, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tinsmith.cli.check.read_with_notes", interrupted)
    assert error_of(capsys, monkeypatch, "check", "file.yaml") == (130, "interrupted")
