"""Runs that stop early: they save once, lose no task, use none twice, and continue as if nothing had happened."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from tests.rl.scripted_run import REPLIES, rows, run, settings
from tinsmith.rl.ending.duration import seconds_of
from tinsmith.rl.ending.stop import Interrupted, StopRequested, StopSignal, WorkCancelled
from tinsmith.rl.run.loop import train
from tinsmith.rl.stages import run_stages
from tinsmith.testing import ScriptedPolicy

ALWAYS = {"advantage": {"std_threshold": None}, "kl": {"type": "k2", "coef": 1e-9}}
"""An algorithm that updates in every step, also without differences of reward."""


class Clock:
    """Seconds that only a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorded(ScriptedPolicy):
    """Counts saves, and calls `after_update` with the number of the update."""

    saves: list[str]

    async def save(self, name, ttl_seconds, metadata=None):
        self.saves.append(name)
        return await super().save(name, ttl_seconds, metadata)

    async def train(self, updates, optimizer, learning_rate):
        results = await super().train(updates, optimizer, learning_rate)
        self.after_update(self.version)
        return results

    after_update = staticmethod(lambda version: None)


def stopped(config, stop: StopSignal, *, after_update=lambda version: None, policy=Recorded):
    """Run with `stop`. Returns the state and the names of the checkpoints saved."""
    saves: list[str] = []

    async def connect(state: str, version: int):
        made = policy(REPLIES, Path(config.folder) / "weights", state=state, version=version)
        made.saves, made.after_update = saves, after_update
        return made

    state = asyncio.run(train(config, connect, Console(file=io.StringIO()), stop))
    return state, [name for name in saves if "sampling" not in name]


def tasks(folder: Path) -> Counter:
    """Tasks of the training rollouts in a folder."""
    lines = [line for file in (folder / "rollouts").glob("train-*.jsonl") for line in file.read_text().splitlines()]
    return Counter(json.loads(line)["task"] for line in lines)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("5h50m", 21_000), ("1.5h", 5400), ("1d 2h", 93_600), ("2m30s", 150), (12.5, 12.5)],
)
def test_lengths_of_time_are_read(text, seconds):
    assert seconds_of(text) == seconds


def test_unreadable_length_of_time_is_refused():
    with pytest.raises(ValueError, match="'5 hours' is not a length of time"):
        seconds_of("5 hours")


def test_signal_follows_the_clock():
    clock = Clock()
    stop = StopSignal(10.0, grace=4.0, clock=clock)
    clock.now += 9.9
    assert not stop.requested
    assert stop.grace_left == 4.0
    clock.now += 0.1
    assert stop.requested
    assert stop.reason == "its time limit"
    clock.now += 3.0
    assert stop.grace_left == 1.0
    stop.request("SIGTERM")
    assert stop.reason == "its time limit"
    with pytest.raises(StopRequested):
        stop.check()


def test_work_is_cancelled_after_the_grace_period():
    async def main() -> list[str]:
        clock, events = Clock(), []
        stop = StopSignal(1.0, grace=5.0, clock=clock)

        async def work() -> None:
            try:
                clock.now += 2.0
                assert stop.requested
                clock.now += 5.0
                await asyncio.Event().wait()
            finally:
                events.append("cancelled")

        with pytest.raises(WorkCancelled):
            await stop.finish(work)
        with pytest.raises(WorkCancelled):
            await stop.finish(work)
        return events

    assert asyncio.run(main()) == ["cancelled"]


@pytest.mark.parametrize("step", [1, 3, 5, 7])
def test_run_resumes_exactly_after_its_time_limit(tmp_path, step):
    run(settings(tmp_path / "whole", algorithm=ALWAYS))
    clock, config = Clock(), settings(tmp_path / "cut", algorithm=ALWAYS)

    def advance(version: int) -> None:
        clock.now += 10.0

    stop = StopSignal(10.0 * step - 5.0, clock=clock)
    state, saves = stopped(config, stop, after_update=advance)
    assert (state.step, stop.stopped_at, state.sampling_path) == (step, f"step {step} of 8", "")
    periodic = [f"step-{number:06}" for number in (3, 6) if number < step]
    assert saves == [*periodic, f"step-{step:06}"]
    state, _ = stopped(config, StopSignal())
    assert state.step == 8
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert tasks(tmp_path / "cut") == tasks(tmp_path / "whole")


def test_stopped_run_stops_at_once_if_no_time_is_left(tmp_path):
    config = settings(tmp_path, eval={"every": 4, "before": False})
    state, saves = stopped(config, StopSignal(0.0))
    assert (state.step, saves) == (0, ["step-000000"])
    state, saves = stopped(config, StopSignal(0.0))
    assert (state.step, saves) == (0, [])
    assert stopped(config, StopSignal())[0].step == 8


class Slow(Recorded):
    """Rollouts of the tasks in `blocked` never finish."""

    blocked: frozenset[str] = frozenset()
    waited = 0

    async def snapshot(self):
        return (await super().snapshot()).around(self.sample_or_wait)

    async def sample_or_wait(self, request, sample):
        if any(question in str(request.prompt) for question in self.blocked):
            type(self).waited += 1
            self.on_wait()
            await asyncio.Event().wait()
        return await sample(request)

    on_wait = staticmethod(lambda: None)


@pytest.mark.parametrize(("staleness", "style"), [(0, "fixed"), (2, "fixed"), (0, "on_publish"), (0, "live")])
def test_unfinished_rollouts_are_sampled_again(tmp_path, staleness, style):
    changes = {"staleness": staleness, "sync": {"style": style}, "filters": [], "eval": {"every": 0, "before": False}}
    if style != "fixed":
        changes["buffer"] = {"type": "memory", "capacity": 2}
    run(settings(tmp_path / "whole", **changes))
    config, stop = settings(tmp_path / "cut", **changes), StopSignal()
    blocked = (tmp_path / "whole" / "rollouts" / "train-000004.jsonl").read_text().splitlines()
    question = json.loads(blocked[0])["messages"][-1]["content"]

    class Blocked(Slow):
        blocked = frozenset([question])
        on_wait = staticmethod(lambda: stop.request("SIGTERM"))

    state, _ = stopped(config, stop, policy=Blocked)
    assert Blocked.waited == 1
    assert state.step < 4
    assert state.batches.unfinished or state.step == 3  # step 3 has a checkpoint of its own
    stopped(config, StopSignal())
    assert tasks(tmp_path / "cut") == tasks(tmp_path / "whole")


def test_cancelled_evaluation_is_made_up_for(tmp_path):
    run(settings(tmp_path / "whole", algorithm=ALWAYS))
    for step, updates in ((0, 0), (4, 4), (8, 8)):
        config, stop = settings(tmp_path / f"cut-{step}", algorithm=ALWAYS), StopSignal()

        class Blocked(Slow):
            blocked = frozenset("0123456789" if not updates else "")
            on_wait = staticmethod(lambda stop=stop: stop.request("SIGTERM"))

        def request(version: int, stop=stop, updates=updates) -> None:
            if version == updates:
                stop.request("SIGTERM")

        state, _ = stopped(config, stop, after_update=request, policy=Blocked)
        assert (state.step, state.evaluation_due, state.sampling_path) == (step, True, "")
        state, _ = stopped(config, StopSignal())
        assert state.sampling_path
        assert rows(tmp_path / f"cut-{step}") == rows(tmp_path / "whole")


def test_sigterm_stops_the_run(tmp_path):
    config, stop = settings(tmp_path, algorithm=ALWAYS), StopSignal()

    async def main():
        async def connect(state, version):
            policy = Recorded(REPLIES, tmp_path / "weights", state=state, version=version)
            policy.saves = []
            policy.after_update = lambda version: version == 2 and os.kill(os.getpid(), signal.SIGTERM)
            return policy

        return await run_stages(config, lambda _: connect, Console(quiet=True), stop)

    with stop.at_signals():
        _, state = asyncio.run(main())
    assert (stop.reason, stop.stopped_at) == ("SIGTERM", f"step {state.step} of 8")
    assert 2 <= state.step <= 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_ctrl_c_after_sigterm_says_what_the_next_one_does(capfd):
    stop = StopSignal(None, 60.0)
    with stop.at_signals():
        stop.begin()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert "Ctrl-C again ends it at once" in capfd.readouterr().err
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.reason == "SIGTERM"
