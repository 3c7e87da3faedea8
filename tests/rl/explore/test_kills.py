"""`kill -9` of processes that sample and of the one that trains, each in a folder of its own, as on several machines.

The run ends as one process that nobody kills, with the same rollouts: each task once in an epoch, none twice, none
lost. To break it: let `Sampler._start_batches` ignore what its name has begun, or `Sampler._drawn` leave `cursor` as it
was.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_commands import PACE, environment
from tests.service.support.databases import SERVER, postgres, url_of
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]

SAMPLERS = ("a", "b", "c")
STEPS, GROUPS, EPOCHS = 12, 3, 2
RUN_FILE = """
model: {name: tiny, rank: 4}
tasks: {train: {type: jsonl, path: %s}, held_out: 0}
rewards:
  - {type: format, pattern: ".*[aeiou].*"}
  - {type: custom, path: "pace:pace"}
sampling: {max_tokens: 4}
optimizer: {learning_rate: 0.05}
steps: 12
groups_per_step: 3
group_size: 2
staleness: 2
backoff: null
checkpoint: {every: 1}
"""
LIMIT_S = 250.0


class Machines:
    """The processes of a run, by name, each in a folder of its own; `train` is the one that trains."""

    def __init__(self, folder: Path, server: dict[str, str], database: str) -> None:
        self.folder, self._server = folder, server
        self._words = [f"buffer={{type: sql, url: '{database}'}}", "sync.timeout=200"]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starts = Counter[str]()

    def start(self, name: str) -> None:
        """Start a process; one that samples is on a new machine each time."""
        self._starts[name] += 1
        if name == "train":
            words = ["mode=train", f"folder={self.folder}/train"]
        else:
            words = ["mode=explore", f"sampler={name}", f"folder={self.folder}/{name}-{self._starts[name]}"]
        self._processes[name] = tinsmith(self.folder, name, *words, *self._words, **self._server)

    def kill(self, name: str) -> None:
        """Kill a process, and start it again."""
        self._processes[name].kill()
        self._processes[name].wait()
        self.start(name)

    def until_trained(self, steps: int) -> None:
        """Wait until this many steps are trained."""
        deadline = time.monotonic() + LIMIT_S
        while trained_steps(self.folder / "train") < steps:
            assert time.monotonic() < deadline, self.logs()
            assert not any(process.poll() for process in self._processes.values()), self.logs()
            time.sleep(0.02)

    def finish(self) -> None:
        """Wait for the end of all processes."""
        for process in self._processes.values():
            assert process.wait(LIMIT_S) == 0, self.logs()

    def close(self) -> None:
        """Kill what is left."""
        for process in self._processes.values():
            process.kill()
            process.wait()

    def logs(self) -> str:
        """The output of all processes."""
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in sorted(self.folder.glob("*.log")))


def tinsmith(folder: Path, name: str, *words: str, **server: str) -> subprocess.Popen[bytes]:
    """Start the run file in `folder`."""
    with (folder / f"{name}.log").open("ab") as log:
        command = [sys.executable, "-m", "tinsmith", "run", "run.yaml", *words]
        pace = {"PACE_S": "0.02"}
        return subprocess.Popen(command, cwd=folder, env={**environment(), **pace, **server}, stdout=log, stderr=log)


def trained_steps(folder: Path) -> int:
    """Steps in the log of a run."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"reward/mean") if file.exists() else 0


def rollouts(folder: Path) -> list[list[Any]]:
    """What each step was trained on: tasks, rewards and replies."""
    files = sorted((folder / "rollouts").glob("train-*.jsonl"))
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [[(line["task"], line["reward"], line["text"]) for line in of_step] for of_step in lines]


@contextmanager
def machines(folder: Path, tiny_llama: Path, database: str) -> Iterator[Machines]:
    """A server, the run in one process, and machines for the same run."""
    rows = [json.dumps({"question": f"What is {number}?", "answer": "0"}) for number in range(STEPS * GROUPS // EPOCHS)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "run.yaml").write_text(RUN_FILE % (folder / "rows.jsonl"))
    (folder / "pace.py").write_text(PACE)
    served = ServeConfig(models=(f"tiny={tiny_llama}",), engine="fake", data=folder / "served")
    with embedded(served) as (url, key), ExitStack() as stack:
        server = {"TINKER_BASE_URL": url, "TINKER_API_KEY": key}
        alone = tinsmith(folder, "alone", f"folder={folder}/alone", **server)
        assert alone.wait(LIMIT_S) == 0, (folder / "alone.log").read_text()
        running = Machines(folder, server, database)
        stack.callback(running.close)
        yield running


def assert_equals_one_process(folder: Path) -> None:
    """Assert that the run is that of one process, and took each task once in an epoch."""
    steps = rollouts(folder / "train")
    assert steps == rollouts(folder / "alone")
    for epoch in range(EPOCHS):
        part = steps[epoch * STEPS // EPOCHS : (epoch + 1) * STEPS // EPOCHS]
        tasks = Counter(task for step in part for task, _, _ in step)
        assert tasks == {f"rows/{number}": 2 for number in range(STEPS * GROUPS // EPOCHS)}


def test_killed_samplers_and_trainer_end_as_one_process(tmp_path, tiny_llama):
    with machines(tmp_path, tiny_llama, f"sqlite:///{tmp_path}/buffer.db") as running:
        for name in (*SAMPLERS, "train"):
            running.start(name)
        for steps, names in ((1, "a"), (3, "b"), (4, "train"), (6, "ca"), (9, "b")):
            running.until_trained(steps)
            for name in ("train",) if names == "train" else names:
                running.kill(name)
        running.finish()
    assert_equals_one_process(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_random_kills_on_postgresql_end_as_one_process(tmp_path, tiny_llama, monkeypatch):
    draw = random.Random(0)
    with postgres() as port:
        monkeypatch.setenv(SERVER, port)
        with machines(tmp_path, tiny_llama, str(url_of(tmp_path))) as running:
            for name in (*SAMPLERS, "train"):
                running.start(name)
            for _ in range(int(os.environ.get("TINSMITH_KILLS", "20"))):
                time.sleep(draw.uniform(0.2, 4.0))
                running.kill(draw.choice((*SAMPLERS, "train")))
            running.finish()
    assert_equals_one_process(tmp_path)
