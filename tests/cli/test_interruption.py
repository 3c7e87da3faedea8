"""What an interruption says: how a run goes on, and nothing of that where there is none."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.test_commands import RUN_FILE, STEPS, metrics, run_and_send, said, tinsmith


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "small.yaml").write_text(RUN_FILE.replace("source: tiny", f"source: {tiny_llama}"))
    return folder


def test_an_interrupted_run_says_how_to_go_on(work):
    assert run_and_send(work, signal.SIGINT, "runs/interrupted") == 130
    text = (work / "log").read_text()
    assert "interrupted; the same command goes on from the last checkpoint" in text
    assert "Traceback" not in text


def test_an_interrupted_run_that_begins_anew_each_time_says_where_it_goes_on(work):
    assert run_and_send(work, signal.SIGINT, "runs/anew", "resume=rename") == 130
    words = "folder=runs/anew resume=true"
    assert f"the same command with {words} goes on from the last checkpoint" in " ".join(
        (work / "log").read_text().split()
    )
    again = tinsmith(work, "run", "small.yaml", "resume=rename", *words.split())
    assert again.returncode == 0, again.stderr
    assert [row["step"] for row in metrics(work / "runs" / "anew") if "reward/mean" in row] == list(range(1, STEPS + 1))


def test_an_interruption_of_what_is_no_run_says_nothing_of_going_on(capsys, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tinsmith.cli.run_file._read", interrupted)
    assert said(capsys, monkeypatch, "check", "file.yaml") == (130, "interrupted")
