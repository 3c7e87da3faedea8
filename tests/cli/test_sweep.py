"""`tinsmith sweep` end to end: killed in the middle, the same command goes on; a run that fails ends no other."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_commands import RUN_FILE, environment, tinsmith, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """Working directory with a run file whose learning rates below 0 fail in the run."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "tiny").symlink_to(tiny_llama)
    text = RUN_FILE.replace('  - {type: custom, path: "pace:pace"}\n', "")
    (folder / "small.yaml").write_text(text)
    return folder


def test_list_prints_combinations_and_runs_nothing(work):
    listed = tinsmith(work, "sweep", "small.yaml", "model.rank=2,4", "seed=0..1", "--list")
    assert listed.stdout.splitlines()[1:] == [
        "model.rank=2  seed=1",
        "model.rank=4  seed=0",
        "model.rank=4  seed=1",
        "4 runs",
    ]
    assert not (work / "runs").exists()


def test_killed_sweep_goes_on_and_names_the_best(work):
    words = ["sweep", "small.yaml", "eval.every=2", "model.rank=2,4", "--json"]
    out = work / "runs" / "small-sweep"
    log = work / "killed.log"
    with log.open("w") as file:
        command = [sys.executable, "-m", "tinsmith", *words, "steps=400"]
        process = subprocess.Popen(command, cwd=work, stdout=file, stderr=file, env=environment())
        wait_for(lambda: len(list(out.glob("*/state.json"))) == 2, log)
        process.send_signal(signal.SIGKILL)
        process.wait(100)
    begun = {path.parent.name: json.loads(path.read_text())["step"] for path in out.glob("*/state.json")}
    last = max(begun.values()) + 2
    done = tinsmith(work, *words, f"steps={last}")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert [row["step"] for row in outcome["settings"]] == [last, last]
    assert outcome["best"] in begun
    assert f"({outcome['best']})" in done.stderr
    checked = tinsmith(work, "check", str(out / "best.yaml"))
    assert checked.returncode == 0, checked.stderr


def test_run_that_fails_ends_no_other(work):
    (work / "breaks.py").write_text("def breaks(task, rollout):\n    return 1.0\n")
    words = ("sweep", "small.yaml", "steps=2", "model.chat_template='{{ messages }}',absent.jinja", "--out", "runs/f")
    done = tinsmith(work, *words)
    assert done.returncode == 1
    assert "1 of 2 runs failed" in done.stderr
    assert "failed with exit code 2" in done.stderr
    assert "once the cause above is mended. For other settings" in done.stderr
