"""User code that raises, returns nonsense, hangs, exits or tampers with the process fails its rollouts, not the run.

To break it: let `is_fault` return False; `checked` return its argument; `bounded` await its task; `event_loop.run` call
asyncio.run; or leave out `_restore` of the watchdog.
"""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from tests.rl.scripted_run import scripted, settings
from tinsmith.errors import TinsmithError
from tinsmith.rl.ending.stop import StopSignal
from tinsmith.rl.guards import event_loop, watchdog
from tinsmith.rl.guards import user_code as guards
from tinsmith.rl.rollouts.failures import FailureLimit
from tinsmith.rl.run.loop import train
from tinsmith.rl.types import Group, Rollout, Task
from tinsmith.rl.workflows.results import checked

pytestmark = pytest.mark.e2e

HERE = "tests.rl.reliability.hostile"
STEPS = 2


def run(folder: Path, **changes):
    """Train STEPS steps as the command does; returns the training rollouts as they are in the run folder."""
    config = settings(folder, steps=STEPS, eval={"every": 0, "before": False, "after": False}, **changes)
    stop = StopSignal()
    with stop.at_signals():
        state = event_loop.run(train(config, scripted(folder.absolute()), Console(file=io.StringIO()), stop))
    assert state.step == STEPS
    files = sorted((folder / "rollouts").glob("train-*.jsonl"))
    assert len(files) == STEPS
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def with_reward(folder: Path, name: str, **changes):
    rollout = {"max_failures": 1, "refills": 20, **changes.pop("rollout", {})}
    size = {"groups_per_step": 1, "group_size": 2} if "isolated" in changes else {}  # a process for each call
    return run(folder, rewards=[{"type": "custom", "path": f"{HERE}:{name}", **changes}], rollout=rollout, **size)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "reward: ValueError: bad luck"),
        ("raises_a_novel", "reward: ValueError: xxx"),
        ("raises_unprintable", "Unprintable, whose message raises RuntimeError"),
        ("exits", "reward: SystemExit: 3"),
        ("calls_sys_exit", "reward: SystemExit: done"),
        ("interrupts", "reward: KeyboardInterrupt"),
        ("cancels", "reward: CancelledError"),
        ("groups", "reward: BaseExceptionGroup: several"),
        ("returns_none", "reward is a NoneType, and must be a number"),
        ("returns_text", "reward is a str, and must be a number"),
        ("returns_complex", "reward is a complex, and must be a number"),
        ("returns_nan", "is nan, and must be a finite number"),
        ("returns_infinity", "is inf, and must be a finite number"),
        ("returns_array", "reward is a ndarray, and must be a number"),
        ("returns_huge", "OverflowError"),
        ("closes_the_loop", "reward: RuntimeError: Cannot close a running event loop"),
    ],
)
def test_bad_reward_fails_its_rollouts_alone(tmp_path, name, reason):
    lines = with_reward(tmp_path, name)
    failed = [line["error"] for line in lines if line["error"]]
    assert 0 < len(failed) < len(lines)
    assert all(reason in error and len(error) < 3000 for error in failed), failed[0]
    assert all(line["reward"] == 0.25 for line in lines if not line["error"])


@pytest.mark.parametrize("name", ["stops_the_loop", "exits_in_a_task", "floods"])
def test_run_goes_on_after_attacks_on_its_loop(tmp_path, name):
    assert all(line["reward"] == 0.25 for line in with_reward(tmp_path, name))


@pytest.mark.parametrize("name", ["blocks", "spins"])
def test_code_that_blocks_the_loop_is_logged_and_interrupted(tmp_path, name, caplog):
    lines = with_reward(tmp_path, name, rollout={"max_blocking": 0.2})
    failed = [line["error"] for line in lines if line["error"]]
    assert failed
    assert all("kept the event loop from running" in error for error in failed)
    assert "The event loop has been blocked" in caplog.text
    assert "hostile.py" in caplog.text


def test_folder_and_signal_actions_are_restored(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watchdog, "_TICK_SECONDS", 0.02)  # many turns in a short run
    action = signal.getsignal(signal.SIGINT)

    def slowly(name):
        lines = with_reward(Path("run") / name, name)
        assert all(line["reward"] == 0.25 for line in lines)
        assert (tmp_path / "run" / name / "state.json").exists()
        assert os.getcwd() == str(tmp_path)

    slowly("changes_the_folder")
    slowly("ignores_ctrl_c")
    assert signal.getsignal(signal.SIGINT) is action


def test_workflow_that_ignores_its_cancellation_is_left(tmp_path, monkeypatch, own_log):
    monkeypatch.setattr(guards, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(event_loop, "CLOSE_SECONDS", 0.1)
    workflow = {"type": "custom", "path": f"{HERE}:never_ends"}
    begin = time.monotonic()
    lines = run(
        tmp_path, workflow=workflow, rewards=[], rollout={"timeout": 0.2, "max_failures": 1, "refills": 20, "split": 1}
    )
    assert time.monotonic() - begin < 600
    failed = [line for line in lines if line["error"]]
    assert failed
    assert {line["error"] for line in failed} == {"timed out after 0.2 seconds"}
    gc.collect()  # asyncio reports tasks that are destroyed before their end
    assert [record.name for record in own_log.records if "asyncio" in record.name] == []
    assert "after its cancellation; the run ends without it" in own_log.text


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (("text",), "the workflow returned a str instead of a Rollout"),
        ((Rollout(metrics=cast(Any, {"x": "many"})),), "metric x is a str"),
        ((Rollout(correct=cast(Any, [1, 2])),), ""),
        ((Rollout(error="e" * 10**6),), "eee"),
    ],
)
def test_wrong_rollouts_fail(result, reason):
    (rollout,) = checked(result, 1)
    assert reason in rollout.error
    assert len(rollout.error) <= guards.MAX_LENGTH


@pytest.mark.parametrize("result", [None, (), (Rollout(), Rollout()), Rollout()])
def test_wrong_number_of_rollouts_is_refused(result):
    with pytest.raises(TypeError, match="instead of 1 rollout"):
        checked(result, 1)


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize(
    ("name", "seconds", "reason"),
    [
        ("leaves_the_process", 100, "the worker process ended"),
        ("leaks", 100, "MemoryError"),
        ("hangs", 1, "took longer than 1 second"),
        ("leaves_by_sys_exit", 100, "SystemExit: 3"),
    ],
)
def test_isolated_reward_harms_only_its_rollout(tmp_path, name, seconds, reason):
    with pytest.raises(TinsmithError, match=r"Every rollout of step 1 failed.*" + reason):
        with_reward(tmp_path, name, isolated=seconds, rollout={"refills": 0})


@pytest.mark.usefixtures("forked_programs")
def test_isolated_reward_scores(tmp_path):
    assert {line["reward"] for line in with_reward(tmp_path, "half", isolated=100)} == {0.5}


def test_too_many_failures_end_with_the_most_frequent_error():
    limit = FailureLimit(0.5, 3)

    def batch(*errors: str) -> tuple[Group, ...]:
        rollouts = tuple(Rollout(error=error) for error in errors)
        return (Group(task=Task(id="t", messages=()), rollouts=rollouts),)

    limit.add(batch("port 1 is closed", "port 2 is closed", "", ""))
    limit.add(batch("port 3 is closed", "late", "", ""))
    limit.add(batch("port 4 is closed", "", "", ""))
    with pytest.raises(TinsmithError) as caught:
        limit.add(batch("port 5 is closed", "late", "port 6 is closed", "port 7 is closed"))
    assert "7 of 12 rollouts of the last 3 batches failed" in caught.value.message
    assert "most frequent error, 5 of 7 times: port 3 is closed" in caught.value.message


def test_run_that_mostly_fails_ends_with_the_reason(tmp_path):
    with pytest.raises(TinsmithError, match=r"allows \(0\.1\)\. The most frequent error.*ValueError: bad luck"):
        with_reward(tmp_path, "raises", rollout={"max_failures": 0.1, "failure_window": 2})


def test_thread_that_hangs_does_not_keep_the_loop(monkeypatch):
    released = threading.Event()

    async def work() -> int:
        asyncio.get_running_loop().run_in_executor(None, released.wait)
        return 3

    monkeypatch.setattr(threading, "Thread", _NeverStarted)
    begin = time.monotonic()
    assert event_loop.run(work()) == 3
    released.set()
    assert time.monotonic() - begin < 60


class _NeverStarted(threading.Thread):
    """Does not start the thread that would end the test process."""

    def start(self) -> None:
        if self.name != "end":
            super().start()
