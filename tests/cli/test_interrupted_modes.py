"""Ctrl-C in mode explore and mode bench: once finishes and writes what is under way and exits 0; twice ends at once.

To break it: leave out `asyncio.wait` in `Sampler.stop`, or `stop.finish` in `bench`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.test_commands import RUN_FILE, STEPS, environment, metrics, wait_for
from tinsmith.rl.rollouts.buffer import FileConfig, open_store
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]

HELD = """
import asyncio, os
from pathlib import Path
from tinsmith.rl.plugins import workflow

calls = 0

@workflow("held")
async def held(task, conversation):
    global calls
    calls += 1
    number = calls
    await conversation.say(*task.messages)
    if number == int(os.environ.get("HOLD_AT", "0")):
        print("held", flush=True)
        while not Path("go").exists():
            await asyncio.sleep(0.05)
        print("let go", flush=True)
"""
"""A workflow whose call HOLD_AT of a process lasts until there is a file `go`."""

SECONDS = 100


class Work:
    """A folder with a run file, and the environment of its server."""

    def __init__(self, folder: Path, server: dict[str, str]) -> None:
        self.folder, self.go, self._server = folder, folder / "go", server

    @contextmanager
    def command(self, name: str, *words: str, hold_at: int = 0) -> Iterator[subprocess.Popen[bytes]]:
        """A running `tinsmith run`, killed at the end of the block."""
        with self._log(name).open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tinsmith", "run", "small.yaml", *words],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env={**environment(), **self._server, "HOLD_AT": str(hold_at)},
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def wait_for(self, name: str, text: str) -> None:
        """Wait until a command has printed a text."""
        wait_for(lambda: text in self.printed(name), self._log(name))

    def printed(self, name: str) -> str:
        """What a command has printed so far, on one line."""
        return " ".join(self._log(name).read_text().split())

    def assert_success(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.wait(SECONDS) == 0, self._log(name).read_text()

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Work]:
    folder = tmp_path_factory.mktemp("work")
    run_file = RUN_FILE.replace('  - {type: custom, path: "pace:pace"}\n', "")
    (folder / "small.yaml").write_text(run_file + "workflow: {type: held}\nplugins: plugins\n")
    (folder / "plugins").mkdir()
    (folder / "plugins" / "held.py").write_text(HELD)
    config = ServeConfig(models=(f"tiny={tiny_llama}",), engine="fake", data=folder / "met")
    with embedded(config) as (url, key):
        yield Work(folder, {"TINKER_BASE_URL": url, "TINKER_API_KEY": key})


def batches_done(folder: Path) -> int:
    """Batches of the run that sampling has stored."""

    async def main() -> int:
        store = open_store(FileConfig(), folder / "buffer", "", shared=True)
        state = await store.state()
        await store.close()
        return state.done

    return asyncio.run(main())


def test_explore_finishes_its_batches_and_continues(work: Work):
    """No task is lost or used twice by an end at once, an end with the batches in flight, and two new starts."""
    words = ("folder=runs/two", "buffer={type: file}", "sync.timeout=400", "staleness=1")
    explore = (*words, "mode=explore")
    with work.command("train", *words, "mode=train") as trainer:
        with work.command("twice", *explore, hold_at=20) as sampler:
            for text in ("held", "Ctrl-C again"):
                work.wait_for("twice", text)
                sampler.send_signal(signal.SIGINT)
            assert sampler.wait(SECONDS) == 130
        assert "interrupted; the same command continues after the last batch in the buffer" in work.printed("twice")
        with work.command("once", *explore, hold_at=20) as sampler:
            work.wait_for("once", "held")
            sampler.send_signal(signal.SIGINT)
            work.wait_for("once", "sampling stops after the batches in flight; Ctrl-C again ends it at once")
            work.go.touch()
            work.assert_success("once", sampler)
        done = batches_done(work.folder / "runs" / "two")
        assert f"let go small: sampled {done} batches small: stopped by Ctrl-C after batch {done}." in work.printed(
            "once"
        )
        assert "The same command continues." in work.printed("once")
        with work.command("again", *explore) as sampler:
            work.assert_success("again", sampler)
        work.assert_success("train", trainer)
    folder = work.folder / "runs" / "two"
    assert [row["step"] for row in metrics(folder) if "reward/mean" in row] == list(range(1, STEPS + 1))
    lines = [line for file in folder.glob("rollouts/train-*.jsonl") for line in file.read_text().splitlines()]
    tasks = Counter(json.loads(line)["task"] for line in lines)
    assert (len(tasks), set(tasks.values())) == (4 * STEPS, {4})


def test_bench_finishes_its_model(work: Work):
    bench = ("folder=runs/one", "mode=bench", "bench={of_run: all}")
    results = work.folder / "runs" / "one" / "bench" / "results.json"
    with work.command("one", "folder=runs/one") as run:
        work.assert_success("one", run)
    work.go.unlink(missing_ok=True)
    with work.command("bench-twice", *bench, hold_at=8) as process:
        for text in ("held", "Ctrl-C again"):
            work.wait_for("bench-twice", text)
            process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
    assert len(json.loads(results.read_text())) == 1
    with work.command("bench-once", *bench, hold_at=8) as process:
        work.wait_for("bench-once", "held")
        process.send_signal(signal.SIGINT)
        work.wait_for("bench-once", "the comparison stops after this model; Ctrl-C again ends it at once")
        work.go.touch()
        work.assert_success("bench-once", process)
    assert "stopped by Ctrl-C after 2 of" in work.printed("bench-once")
    assert len(json.loads(results.read_text())) == 2
