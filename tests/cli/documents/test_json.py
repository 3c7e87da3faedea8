"""`--json` of run and check: standard output is one document, whatever else is printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.rl.scripted_run import run as run_scripted
from tests.rl.scripted_run import settings
from tinsmith import cli
from tinsmith.cli import check, runner
from tinsmith.cli.documents.run import document_of
from tinsmith.cli.show import show
from tinsmith.errors import ConfigError

RUN = {
    "model": {"name": "tiny"},
    "tasks": {"train": {"type": "jsonl", "path": "rows.jsonl"}},
    "rewards": [{"type": "number"}],
    "groups_per_step": 2,
    "steps": 3,
    "name": "sums",
}
FIELDS = [
    *("name", "folder", "state", "reason", "step", "steps", "updates", "summary", "findings", "checkpoint"),
    *("comparison", "results", "metrics", "stages", "parts"),
]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run file with ten rows of data beside it, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(f'{{"question": "Q{n}?", "answer": "{n}"}}\n' for n in range(10)))
    Path("run.yaml").write_text(yaml.safe_dump(RUN))
    return "run.yaml"


def test_check_prints_one_document(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    check.check(file, as_json=True)
    document = json.loads(capsys.readouterr().out)
    (data,) = document.pop("data")
    assert document == {
        "file": "run.yaml",
        "dialect": "",
        "notes": [],
        "name": "sums",
        "model": "tiny",
        "mode": "both",
        "summary": "grpo on tiny, 3 steps",
        "parts": [],
        "gradients": [],
    }
    assert data["tasks"] == {"count": 9, "per_step": 2, "steps_per_epoch": 4.5}
    assert (data["stage"], data["held_out"], data["demonstrations"], data["not_opened"]) == ("", 1, None, [])
    assert [set(row) for row in data["examples"]] == [{"id", "prompt", "answer"}] * 3


def test_check_has_the_data_of_each_stage(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"type": "jsonl", "path": "rows.jsonl"}
    first = {"name": "learn", "algorithm": {"type": "sft"}, "demonstrations": {"data": rows}, "steps": 1}
    Path(file).write_text(yaml.safe_dump({**RUN, "stages": [first, {"name": "try", "steps": 2}]}))
    check.check(file, as_json=True)
    learn, attempt = json.loads(capsys.readouterr().out)["data"]
    assert (learn["stage"], learn["demonstrations"]["count"], learn["tasks"]) == ("learn", 10, None)
    assert (attempt["stage"], attempt["demonstrations"], attempt["tasks"]["count"]) == ("try", None, 9)


def test_invalid_file_is_an_error_and_no_document(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("steps=x", "tasks.train.path=none.jsonl"):
        with pytest.raises(ConfigError):
            check.check(file, word, as_json=True)
        with pytest.raises(ConfigError):
            cli.run(file, "steps=x", as_json=True)
    assert capsys.readouterr().out == ""


def run_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str, folder: Path, end: Any):
    """The document of `tinsmith run --json` on a scripted run, which prints to standard output and ends with `end`."""

    def train(config: Any, console: Any) -> Any:
        sys.stdout.write("a reward of one's own prints this\n")
        console.print("so does a monitor")
        state = run_scripted(settings(folder, steps=3), console=console)
        if end is not None:
            raise end
        return settings(folder, steps=3), state

    monkeypatch.setattr(runner, "train", train)
    error: BaseException | None = None
    try:
        cli.run(file, f"folder={folder}", as_json=True)
    except (runner.StoppedEarly, SystemExit) as raised:
        error = raised
    printed = capsys.readouterr()
    assert "prints this" in printed.err
    assert "so does a monitor" in printed.err
    return json.loads(printed.out), error


def test_run_prints_what_show_prints(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document, error = run_as_json(monkeypatch, capsys, file, tmp_path / "run", None)
    assert error is None
    assert list(document) == FIELDS
    assert (document["state"], document["step"], document["checkpoint"]["step"]) == ("finished", 3, 3)
    assert document["checkpoint"]["weights"]
    show(tmp_path / "run", as_json=True)
    assert json.loads(capsys.readouterr().out) == document


def test_stopped_run_prints_its_document_too(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = runner.StoppedEarly("stopped", "continue", by_user=False)
    document, error = run_as_json(monkeypatch, capsys, file, tmp_path / "run", stopped)
    assert error is stopped
    assert document["step"] == 3


def test_modes_print_their_part_of_the_run(tmp_path: Path) -> None:
    results = [{"checkpoint": "tiny", "eval/reward/mean": 0.5}]
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "results.json").write_text(json.dumps(results))
    config = settings(tmp_path).model_copy(update={"mode": "bench"})
    document = document_of(config)
    assert (document["results"], document["checkpoint"]) == (results, None)
    assert document["folder"] == str(tmp_path / "bench")


def test_fields_are_documented(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "json.md").read_text()
    check.check(file, as_json=True)
    document = json.loads(capsys.readouterr().out)
    fields = [*FIELDS, *document, *document["data"][0], *document["data"][0]["tasks"]]
    assert [name for name in fields if f"`{name}`" not in page] == []
