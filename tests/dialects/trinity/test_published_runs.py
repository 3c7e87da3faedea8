"""The two published files run unchanged against a server, save a checkpoint and resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dialects.trinity.conftest import Server
from tests.dialects.trinity.files import TINKER, VERL

SHORT = ("groups_per_step=2", "group_size=2", "sampling.max_tokens=4", "sampling.max_prompt_tokens=4000")


def tinsmith(place: Path, server: Server, *words: str) -> subprocess.CompletedProcess[str]:
    url, key = server
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("TINKER_", "TRINITY_", "WANDB_"))
    }
    variables = {"TINKER_BASE_URL": url, "TRINITY_API_KEY": key, "HF_HOME": str(place / "hf"), "HF_HUB_OFFLINE": "1"}
    variables |= {"COLUMNS": "100", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "-m", "tinsmith", *words]
    return subprocess.run(
        command, cwd=place, env={**clean, **variables}, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.parametrize("file", [TINKER, VERL], ids=lambda file: file.stem)
def test_published_file_trains_saves_and_resumes(file: Path, place: Path, server: Server):
    before = file.read_bytes()
    done = tinsmith(place, server, "run", "--config", str(file), *SHORT, "steps=2", "checkpoint.every=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a file of Trinity-RFT" in done.stdout
    assert "cluster.node_num, cluster.gpu_per_node" in " ".join(done.stdout.split())
    (folder,) = (place / "checkpoints" / "Trinity-RFT-gsm8k" / "alignment-tinker").iterdir()
    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == 2
    assert state["path"].startswith("tinker://")
    first = json.loads((folder / "rollouts" / "train-000001.jsonl").read_text().splitlines()[0])
    assert "What is 0 + 3?" in json.dumps(first)  # in the file's order
    assert file.read_bytes() == before
    if file == VERL:
        return
    resumed = tinsmith(place, server, "run", "--config", str(file), *SHORT, "steps=3", "checkpoint.every=1")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
