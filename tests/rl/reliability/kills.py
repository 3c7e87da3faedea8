"""Runs of `tinsmith run` in processes that are killed, and what is left of them in the end."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from tests.rl.reliability.proxy import Phase

RUN_FILE = """
model: {name: tiny, rank: 4}
tasks: {train: {type: addition}, held_out: 4}
rewards: [{type: format, pattern: ".*[aeiou].*[aeiou].*"}]
sampling: {max_tokens: 5}
optimizer: {learning_rate: 0.02}
steps: 5
groups_per_step: 3
group_size: 3
eval: {every: 2}
checkpoint: {every: 1}
"""
STEPS = 5
SECONDS = 120.0
"""Time limit of a run."""


class Work(NamedTuple):
    """A folder with run.yaml, a service with its data folder, and the outcome of a run that was not killed."""

    folder: Path
    url: str
    key: str
    data: Path
    expected: dict[str, Any]
    requests: list[tuple[Phase, str]]


def start(work: Path, folder: Path, url: str = "", key: str = "", *settings: str) -> subprocess.Popen[bytes]:
    """Start the run of RUN_FILE in `folder`; without `url`, with a service of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    server = {"TINKER_BASE_URL": url, "TINKER_API_KEY": key} if url else {}
    with (work / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tinsmith", "run", "run.yaml", f"folder={folder}", *settings],
            cwd=work,
            stdout=log,
            stderr=log,
            env={**clean, **server, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        )


def outcome(folder: Path, data: Path) -> dict[str, Any]:
    """What a finished run leaves: a digest of its weights and optimizer, its metrics without times, its rollouts."""
    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == STEPS
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timeless = [{k: v for k, v in row.items() if not k.startswith(("time/", "speed/"))} for row in rows]
    rollouts = {
        file.name: [
            (line["task"], line["reward"], line["text"]) for line in map(json.loads, file.read_text().splitlines())
        ]
        for file in sorted((folder / "rollouts").glob("*.jsonl"))
    }
    left = [file.name for file in folder.rglob("*.part") if "service" not in file.parts]
    return {"weights": digest(data, state["path"]), "metrics": timeless, "rollouts": rollouts, "left": left}


def digest(data: Path, path: str) -> str:
    """A digest of the files of the state checkpoint at a tinker:// path of a service with the data folder `data`."""
    run, name = path.removeprefix("tinker://").split("/weights/")
    with closing(sqlite3.connect(data / "tinsmith.db")) as database:
        query = "select id from checkpoints where run = ? and name = ? and optimizer and not deleted"
        ((folder,),) = database.execute(query, (run, name)).fetchall()
    files = sorted((data / "checkpoints" / folder).glob("*.safetensors"))
    assert len(files) == 2
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
