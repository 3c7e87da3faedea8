"""What monitors show of the diagnosis: new findings during the run, all of them at its end."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from tests.rl.scripted_run import run, settings
from tinsmith.rl.record.monitors.background import BackgroundMonitor
from tinsmith.rl.record.monitors.base import Monitor, Monitors

UNREWARDED = [{"type": "format", "pattern": "never"}]


def printed(folder: Path, **changes) -> str:
    output = io.StringIO()
    config = settings(folder, monitors=[{"type": "console"}], **changes)
    run(config, console=Console(file=output, width=500))
    return output.getvalue()


def test_console_prints_findings_as_they_arise_and_at_the_end(tmp_path):
    text = printed(tmp_path / "run", rewards=UNREWARDED, eval={"every": 0})
    live = [
        line for line in text.splitlines() if line.startswith("error: step 5: None of the 5 steps updated the weig")
    ]
    assert len(live) == 1
    assert text.splitlines()[-2] == (
        "diagnosis: none of 8 steps updated the weights: equal rewards in every group in 8"
    )
    assert text.splitlines()[-1].startswith(
        "error: None of the 8 steps updated the weights: in each of them, every reply to a"
    )
    assert "Set group_size: 8" in text.splitlines()[-1]


def test_console_of_a_healthy_run_says_that_there_are_none(tmp_path):
    text = printed(tmp_path / "run", steps=4)
    assert text.splitlines()[-1] == "diagnosis: all 4 steps updated the weights; no findings"


def test_resumed_run_is_diagnosed_as_a_whole(tmp_path):
    printed(tmp_path / "run", rewards=UNREWARDED, steps=4)
    assert "none of 8 steps updated the weights" in printed(tmp_path / "run", rewards=UNREWARDED, steps=8)


def test_report_begins_with_the_diagnosis_and_what_is_measured(tmp_path):
    parts = [{"type": "format", "pattern": "y.*", "name": name, "weight": 0.25} for name in ("first", "second")]
    run(settings(tmp_path / "run", rewards=parts, eval={"every": 3}, monitors=[{"type": "report"}]))
    page = (tmp_path / "run" / "report.html").read_text()
    headline, _, rest = page.partition('<h2 id="diagnosis">')
    assert "held-out reward" in headline  # nothing says what is right, and 0.5 is below eval.threshold
    assert "held-out tasks right" not in headline
    assert "All 8 steps updated the weights." in rest.partition("<h2")[0]
    assert "No findings." in rest.partition("<h2")[0]
    assert "Reward by part" in rest
    assert "Held-out accuracy" not in rest
    for chart in re.findall(r"<svg viewBox.*?</svg>", rest.partition('<h2 id="timeline')[0], re.DOTALL):
        assert re.findall(r'text-anchor="middle">(\d+)<', chart) == ["0", "2", "4", "6", "8"]


class Recording(Monitor):
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[str, ...]]] = []

    def metrics(self, step, values) -> None:
        """Not kept."""

    def rollouts(self, step, kind, groups) -> None:
        """Not kept."""

    def diagnosis(self, step, diagnosis) -> None:
        self.calls.append((step, tuple(each.name for each in diagnosis.findings)))

    def close(self) -> None:
        self.calls.append((-1, ()))


def test_monitors_receive_changes_and_the_last_diagnosis(tmp_path):
    monitor = Recording()
    monitors = Monitors([BackgroundMonitor(monitor)])
    for step in range(1, 9):
        monitors.metrics(step, {"reward/mean": 0.0, "groups/constant": 1.0, "optim/skipped": 1.0})
    monitors.close()
    assert monitor.calls == [(5, ("no_update",)), (8, ("no_update",)), (-1, ())]
