"""`tinsmith.train` in the cells of a real notebook, and wherever else an event loop runs already."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

import tinsmith
from tests.test_public_api import RUN_FILE
from tinsmith.errors import UserError
from tinsmith.rl.guards import event_loop
from tinsmith.rl.guards.user_code import Interrupted
from tinsmith.rl.guards.watchdog import watch_event_loop
from tinsmith.rllm import AgentConfig, evaluator, rollout
from tinsmith.rllm import Task as FlowTask
from tinsmith.testing import run_virtually

pytestmark = pytest.mark.e2e


@pytest.fixture
def work(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a run file; notebooks keep their own files in it too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    (tmp_path / "small.yaml").write_text(RUN_FILE.replace("source: tiny", f"source: {tiny_llama}"))
    return tmp_path


TRAIN = 'import tinsmith\nresult = tinsmith.train("small.yaml", "steps=2")'
USE = "print(result.step, result.sampling_path.startswith('tinker://'), len(tinsmith.read_metrics(result.folder)))"
AGAIN = 'print(tinsmith.train("small.yaml", "steps=2") == result, tinsmith.train("small.yaml", "steps=3").step)'
FAILS = (
    'try:\n    tinsmith.train("small.yaml", "steps=none")\nexcept Exception as error:\n    print(type(error).__name__)'
)
OPEN = """
async with tinsmith.open_run("small.yaml", "folder=runs/own") as run:
    print(len((await run.next_batch(1)).groups))
"""


def test_cells_of_a_notebook_train_and_use_the_result(work: Path) -> None:
    cells = [nbformat.v4.new_code_cell(text) for text in (TRAIN, USE, AGAIN, FAILS, OPEN)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=250, kernel_name="python3").execute()
    progress, used, again, failed, opened = (_stdout(cell["outputs"]) for cell in notebook["cells"])
    assert "step 1/2" in progress
    assert "step 2/2" in progress
    assert used == "2 True 3\n"
    assert again.splitlines()[-1] == "True 3"
    assert failed == "ConfigError\n"
    assert opened.splitlines()[-1] == "2"


def _stdout(outputs: list[Any]) -> str:
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


@pytest.fixture
def kernel(work: Path) -> Iterator[KernelManager]:
    """A kernel as a notebook has."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(work))
    yield manager
    manager.shutdown_kernel(now=True)


def test_interrupting_the_kernel_stops_the_run_cleanly(kernel: KernelManager) -> None:
    client = kernel.client()
    client.start_channels()
    client.wait_for_ready(timeout=250)
    code = (
        'import tinsmith\nresult = tinsmith.train("small.yaml", "steps=100000")\nprint("stopped by", result.stopped_by)'
    )
    printed: list[str] = []

    def output(message: dict[str, Any]) -> None:
        if message["msg_type"] != "stream":
            return
        printed.append(message["content"]["text"])
        if "step      1/100000" in "".join(printed) and "interrupted" not in printed:
            printed.append("interrupted")
            kernel.interrupt_kernel()

    reply = client.execute_interactive(code, output_hook=output, timeout=250)
    client.stop_channels()
    assert reply["content"]["status"] == "ok"
    assert "stopped by Ctrl-C" in "".join(printed)


def test_train_runs_in_an_async_function(work: Path) -> None:
    async def use() -> list[int]:
        inner = tinsmith.train("small.yaml", "steps=1").step
        return [inner, (await asyncio.to_thread(tinsmith.train, "small.yaml", "steps=2")).step]

    assert asyncio.run(use()) == [1, 2]


async def _doubled(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def test_work_under_a_loop_returns_and_raises() -> None:
    async def fails() -> None:
        raise RuntimeError("of the work")

    async def exits() -> None:
        raise SystemExit(3)

    async def use() -> int:
        with pytest.raises(RuntimeError, match="of the work"):
            event_loop.run(fails())
        with pytest.raises(SystemExit):
            event_loop.run(exits())
        return event_loop.run(_doubled(2)) + event_loop.run(_doubled(3))

    assert asyncio.run(use()) == 10


def test_interrupt_cancels_the_work_in_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the thread is interrupted, as by a second Ctrl-C."""
    begun, ended = threading.Event(), threading.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.sleep(1000)
        finally:
            ended.set()

    def result(_self: event_loop.Future[Any], _timeout: float | None = None) -> None:
        begun.wait(100)
        raise Interrupted

    monkeypatch.setattr(event_loop.Future, "result", result)

    async def use() -> None:
        with pytest.raises(Interrupted):
            event_loop.run(work())

    asyncio.run(use())
    assert ended.is_set()


def test_user_code_that_keeps_stopping_the_loop_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> str:
        for _ in range(1000):
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0)
        return "ended"

    assert event_loop.run(work()) == "ended"
    assert len(caplog.records) < 15  # not one for each


def test_user_code_that_closes_the_loop_is_an_error() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.run_forever = loop.close  # between two rounds, as by another thread
        loop.stop()
        await asyncio.sleep(1000)

    with pytest.raises(UserError, match="closed the event loop"):
        event_loop.run(work())


def test_flows_of_rllm_run_under_a_loop() -> None:
    @rollout(name="solver")
    async def solve(task: FlowTask, config: AgentConfig) -> str:
        return "4"

    @evaluator
    def correct(task: FlowTask, episode: Any) -> float:
        return 1.0

    async def use() -> float:
        task = FlowTask(id="1", instruction="2 + 2?")
        episode = solve.run(task, AgentConfig(base_url="", model="", session_uid=""))
        return correct.evaluate(task, episode).reward

    assert asyncio.run(use()) == 1.0


@pytest.mark.parametrize("keep_signals", [True, False])
def test_signals_are_kept_for_runs_that_stop_at_them(keep_signals: bool) -> None:
    """A kernel sets SIGINT with each cell, while `open_run` of an earlier cell goes on."""
    previous = signal.getsignal(signal.SIGINT)

    async def work() -> bool:
        with watch_event_loop(100.0, keep_signals=keep_signals):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            await asyncio.sleep(10)
            return signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    try:
        assert run_virtually(work()) is not keep_signals
    finally:
        signal.signal(signal.SIGINT, previous)
