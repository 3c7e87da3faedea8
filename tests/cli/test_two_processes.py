"""Two processes share one run at one server and are killed on the way; mode bench then compares its checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.test_commands import PACE, RUN_FILE, STEPS, environment, metrics, tinsmith, wait_for
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]

WORDS = ("run", "small.yaml", "folder=runs/two", "buffer={type: file}", "sync.timeout=400", "staleness=1")
ROLLOUTS = 16
"""Of a step; each has a reward."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working directory with a run file."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "small.yaml").write_text(RUN_FILE)
    (folder / "pace.py").write_text(PACE)
    return folder


@contextmanager
def started(work: Path, mode: str, server: dict[str, str], hold_at: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """A running process of a mode, killed at the end of the block. It stops at its reward number `hold_at`, so that the
    run does not go on meanwhile, until the file `holds` is removed."""
    command = [sys.executable, "-m", "tinsmith", *WORDS, f"mode={mode}"]
    with (work / f"{mode}.log").open("w") as log:
        variables = {**environment(), **server, "HOLD_AT": str(hold_at), "HOLDS": str(work / "holds")}
        process = subprocess.Popen(command, cwd=work, env=variables, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def training_rows(work: Path) -> list[dict[str, float]]:
    """Rows of metrics.jsonl, one for each step."""
    return [row for row in metrics(work / "runs" / "two") if "reward/mean" in row]


def trained_steps(work: Path) -> int:
    """Steps trained so far; the last row may be written at this moment."""
    file = work / "runs" / "two" / "metrics.jsonl"
    return file.read_bytes().count(b"reward/mean") if file.exists() else 0


def kill_after(work: Path, steps: int, process: subprocess.Popen[bytes]) -> None:
    """Kill a process once `steps` steps are trained."""
    wait_for(lambda: trained_steps(work) >= steps, work / "train.log")
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def assert_success(work: Path, mode: str, process: subprocess.Popen[bytes]) -> None:
    assert process.wait(400) == 0, (work / f"{mode}.log").read_text()


def test_two_processes_share_a_run_and_survive_kills(work, tiny_llama):
    with embedded(ServeConfig(models=(f"tiny={tiny_llama}",), engine="fake", data=work / "met")) as (url, key):
        server, holds = {"TINKER_BASE_URL": url, "TINKER_API_KEY": key}, work / "holds"
        with started(work, "train", server) as trainer:
            with started(work, "explore", server, hold_at=4 * ROLLOUTS + 1) as sampler:
                wait_for(holds.exists, work / "explore.log")
                kill_after(work, 2, sampler)
            holds.unlink()
            with started(work, "explore", server, hold_at=5 * ROLLOUTS + 1) as sampler:
                wait_for(holds.exists, work / "explore.log")
                kill_after(work, 6, trainer)
                holds.unlink()
                with started(work, "train", server) as restarted:
                    assert_success(work, "train", restarted)
                assert_success(work, "explore", sampler)
        compared = tinsmith(work, *WORDS, "mode=bench", **server)
    assert compared.returncode == 0, compared.stderr
    rows = training_rows(work)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["sync/weights"] for row in rows] == [0, *range(STEPS - 1)]
    results = json.loads((work / "runs" / "two" / "bench" / "results.json").read_text())
    assert [row["checkpoint"].partition(":")[0] for row in results] == ["tiny", "tinker"]


def test_two_processes_need_a_shared_server(work):
    for mode in ("explore", "train"):
        alone = tinsmith(work, "run", "small.yaml", f"mode={mode}", "buffer={type: file}", "folder=runs/alone")
        assert alone.returncode == 2
        assert "needs a server that both can reach" in alone.stderr
