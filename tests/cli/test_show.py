"""`tinsmith show`: overview, lists, one rollout and its group, in terminals and pipes, and as JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.rl.history.test_transcript import HOSTILE, record
from tests.rl.scripted_run import run, settings
from tinsmith.cli.show import Listed, Shown, show
from tinsmith.errors import ConfigError
from tinsmith.rl.history import RunHistory
from tinsmith.rl.history.console_rollout import print_group
from tinsmith.rl.history.console_run import print_overview, print_rollouts
from tinsmith.rl.history.console_text import sparkline
from tinsmith.rl.record.layout import Layout

NEVER_PRINTED = ("\x1b[31mANSI", "\x07", "\u202e", "\0")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps with the scripted policy."""
    folder = tmp_path_factory.mktemp("show") / "run"
    run(settings(folder, steps=3))
    return folder


def hostile_run(folder: Path) -> RunHistory:
    """A run whose names and texts are hostile, and whose last lines are cut off or no text."""
    file = Layout(folder).rollouts("train", 1)
    file.parent.mkdir(parents=True)
    long = record("x", error="")
    long["trajectories"][0]["turns"][0]["text"] = "x" * 10_000_000
    lines = [json.dumps(record(HOSTILE)), json.dumps(long), '{"task": "to']
    file.write_bytes("\n".join(lines).encode() + b"\xff\xfe")
    Layout(folder).settings.write_text(json.dumps({"name": HOSTILE, "steps": 3}))
    Layout(folder).metrics.write_text(json.dumps({"step": 1, f"reward/{HOSTILE}": 1.0, "reward/mean": None}) + '\n{"st')
    return RunHistory.open(folder)


def printed(print_to: Any, *, width: int = 80, color: Any = None) -> str:
    """What `print_to` prints to a terminal with colors, or to a pipe."""
    file = io.StringIO()
    print_to(Console(file=file, width=width, force_terminal=color is not None, color_system=color, highlight=False))
    return file.getvalue()


def test_overview_has_state_curves_and_comparison(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(finished)
    text = capsys.readouterr().out
    assert "small  finished  step 3 of 3" in text
    assert "reward/mean" in text
    assert "step 3 against step 0" in text
    assert "\x1b" not in text
    show(finished, as_json=True)
    overview = json.loads(capsys.readouterr().out)
    assert (overview["state"], overview["step"], overview["metrics"]["step"]) == ("finished", 3, [0, 1, 2, 3])


def test_lists_rollouts_that_conditions_select(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(finished, listed=Listed(step="2..3", reward="1..", sort="tokens"), as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert {row["reward"] for row in listed["rollouts"]} <= {1.0}
    assert all(row["step"] in (2, 3) and row["id"].startswith("train-") for row in listed["rollouts"])
    show(finished, listed=Listed(eval=True, limit=2))
    assert "2 of 10 rollouts" in capsys.readouterr().out
    show(finished, listed=Listed(search="no such text"))
    assert "0 of 0 rollouts" in capsys.readouterr().out


def test_one_rollout_and_its_group(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(finished, "train-2-5", shown=Shown(tokens="advantage"))
    text = capsys.readouterr().out
    assert "group 1, number 1" in text
    assert "right answer" in text
    show(finished, "train-2-5", shown=Shown(group=True), as_json=True)
    assert [each["id"] for each in json.loads(capsys.readouterr().out)] == [f"train-2-{at}" for at in range(4, 8)]
    with pytest.raises(ConfigError, match="There is no rollout train-99-0"):
        show(finished, "train-99-0")
    with pytest.raises(ConfigError, match="need a rollout"):
        show(finished, shown=Shown(thinking=True))
    with pytest.raises(ConfigError, match="Conditions select rollouts of a list"):
        show(finished, "train-2-5", listed=Listed(failed=True))


@pytest.mark.parametrize(
    ("option", "value"), [("reward", "a..b"), ("reward", "nan"), ("step", "1.5"), ("step", "1..x")]
)
def test_ranges_are_checked(finished: Path, option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"--{option}"):
        show(finished, listed=Listed(**{option: value}))


@pytest.mark.parametrize("color", [None, "truecolor"])
def test_hostile_text_is_printed_as_text(tmp_path: Path, color: Any) -> None:
    history = hostile_run(tmp_path)
    page = history.rollouts.find()
    records = [history.rollouts.read(row) for row in page.rows]
    assert (page.total, records[2]) == (3, {})

    def everything(console: Console) -> None:
        print_overview(history, console)
        print_rollouts(history, page, console)
        for measure in (None, "logprob"):
            print_group(page.rows, records, console, measure=measure, thinking=True)

    for width in (20, 200):
        text = printed(everything, width=width, color=color)
        assert len(text) < 1_000_000
        assert [code for code in NEVER_PRINTED if code in text] == []
        assert "[red]" in text.replace("\n", "").replace(" ", "")


def test_sparklines_fit_and_show_gaps() -> None:
    assert sparkline([0.0, 1.0, float("nan"), 0.5], 10) == "▁█ ▅"
    assert len(sparkline(list(range(1000)), 40)) == 40
    assert (sparkline([], 10), sparkline([1.0], 0), sparkline([2.0, 2.0], 5)) == ("", "", "▁▁")
