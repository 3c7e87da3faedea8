"""Ctrl-C prints how to resume a run, and nothing about resuming in commands without a run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.test_commands import RUN_FILE, STEPS, error_of, metrics, run_and_send, tinsmith

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """Working directory with a run file."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "small.yaml").write_text(RUN_FILE.replace("source: tiny", f"source: {tiny_llama}"))
    return folder


def test_interrupted_run_prints_how_to_resume(work):
    assert run_and_send(work, signal.SIGINT, "runs/interrupted") == 130
    text = (work / "log").read_text()
    assert "interrupted; the same command resumes from the last checkpoint" in text
    assert "Traceback" not in text


def test_interrupted_run_names_its_folder_with_resume_rename(work):
    assert run_and_send(work, signal.SIGINT, "runs/renamed", "resume=rename") == 130
    words = "folder=runs/renamed resume=true"
    assert f"the same command with {words} resumes from the last checkpoint" in " ".join(
        (work / "log").read_text().split()
    )
    again = tinsmith(work, "run", "small.yaml", "resume=rename", *words.split())
    assert again.returncode == 0, again.stderr
    assert [row["step"] for row in metrics(work / "runs" / "renamed") if "reward/mean" in row] == list(
        range(1, STEPS + 1)
    )


def test_interrupted_check_prints_nothing_about_resuming(capsys, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tinsmith.cli.run_file._read", interrupted)
    assert error_of(capsys, monkeypatch, "check", "file.yaml") == (130, "interrupted")
