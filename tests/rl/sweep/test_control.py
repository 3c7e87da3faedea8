"""A sweep starts its runs, ends those that halving drops, and goes on after it was killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rl.scripted_run import settings
from tinsmith.errors import ConfigError
from tinsmith.rl.ending.stop import StopSignal
from tinsmith.rl.record.layout import Layout
from tinsmith.rl.sweep import results
from tinsmith.rl.sweep.combinations import combinations
from tinsmith.rl.sweep.control import Halving, SweepRun
from tinsmith.rl.sweep.folder import Status, SweepFolder
from tinsmith.rl.sweep.members import HELD_OUT_REWARD, Member, metric_of
from tinsmith.terminal import REFUSED, STOPPED_EARLY, TRAINED_NOTHING

STEPS = 8


def members(folder: SweepFolder, *words: str) -> list[Member]:
    return [Member(each, settings(folder.run(each.name), name=each.name, steps=STEPS)) for each in combinations(words)]


class Killed(Exception):
    """The end of a sweep by SIGKILL."""


class FakeRuns:
    """Processes that take a step each time the sweep sleeps; `reward` says what they measure."""

    def __init__(self, reward: Callable[[str, int], float], fails: tuple[str, ...] = ()) -> None:
        self.reward, self.fails, self.failing_code, self.last_code = reward, fails, 1, 0
        self.running: dict[str, FakeRun] = {}
        self.started: list[str] = []
        self.servers: dict[str, str] = {}
        self.most = 0
        self.stop_at: tuple[int, StopSignal] | None = None
        self.sleeps = self.killed_at = 0

    def start(self, member: Member, record: Any) -> FakeRun:
        self.started.append(member.name)
        self.servers[member.name] = record.server
        self.running[member.name] = run = FakeRun(member, self)
        return run

    def sleep(self, _seconds: float) -> None:
        self.sleeps += 1
        running = [run for run in self.running.values() if run.code is None]
        self.most = max(self.most, len(running))
        for run in running:
            run.advance()
        if self.stop_at and self.sleeps == self.stop_at[0]:
            self.stop_at[1].request("SIGTERM")
        if self.sleeps == self.killed_at:
            raise Killed


class FakeRun:
    def __init__(self, member: Member, runs: FakeRuns) -> None:
        self.member, self.runs = member, runs
        self.code: int | None = None
        self.terminated = False

    def advance(self) -> None:
        name, layout = self.member.name, Layout(self.member.path)
        if self.terminated:
            self.code = STOPPED_EARLY
        elif name in self.runs.fails:
            self.code = self.runs.failing_code
        else:
            step = self.member.step + 1
            layout.path.mkdir(parents=True, exist_ok=True)
            with layout.metrics.open("a") as file:
                file.write(json.dumps({"step": step, "eval/reward/mean": self.runs.reward(name, step)}) + "\n")
            self.code = self.runs.last_code if step == STEPS else None

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.terminated = True

    def kill(self) -> None:
        self.code = -9


def by_rank(name: str, step: int) -> float:
    """Higher ranks are better, and seeds differ."""
    parts = dict(part.split("=") for part in name.split(","))
    return int(parts["rank"]) + 0.1 * int(parts.get("seed", 0)) + 0.01 * step


WORDS = ("model.rank=1,2,4,8", "seed=0..1")
HALVING = Halving(metric=HELD_OUT_REWARD, share=2, steps=(2, 4))


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    folder = SweepFolder(tmp_path / "sweep")
    folder.path.mkdir()
    return folder


def sweep(folder: SweepFolder, runs: FakeRuns, words: tuple[str, ...] = WORDS, **options: Any) -> dict[str, Status]:
    made = members(folder, *words)
    options = {"at_once": len(made), "report": lambda _: None, **options}
    return dict(SweepRun(members=made, folder=folder, start=runs.start, sleep=runs.sleep, **options).run())


def test_all_runs_train_at_once_to_their_ends(folder):
    runs = FakeRuns(by_rank)
    assert set(sweep(folder, runs).values()) == {"finished"}
    assert runs.most == len(runs.started) == 8


def test_halving_ends_whole_settings(folder):
    statuses = sweep(folder, FakeRuns(by_rank), halving=HALVING)
    assert {name for name, status in statuses.items() if status == "finished"} == {"rank=8,seed=0", "rank=8,seed=1"}
    steps = {member.name: member.step for member in members(folder, *WORDS)}
    assert steps["rank=1,seed=0"] < steps["rank=4,seed=0"] < steps["rank=8,seed=0"] == STEPS


@pytest.mark.parametrize("at_once", [1, 3])
def test_fewer_runs_at_once_give_the_same_outcome(folder, at_once):
    runs = FakeRuns(by_rank)
    statuses = sweep(folder, runs, at_once=at_once, halving=HALVING)
    assert {name for name, status in statuses.items() if status == "finished"} == {"rank=8,seed=0", "rank=8,seed=1"}
    assert set(statuses.values()) == {"finished", "ended"}
    assert runs.most <= at_once


def test_failed_run_ends_no_other(folder):
    statuses = sweep(folder, FakeRuns(by_rank, fails=("rank=8,seed=0",)), halving=HALVING)
    assert statuses["rank=8,seed=0"] == "failed"
    assert statuses["rank=8,seed=1"] == "finished"


@pytest.mark.parametrize("code", [1, REFUSED])
def test_runs_that_fail_on_their_settings_are_named(folder, code):
    """The same command would fail again, as after a change of settings that a run in progress refuses."""
    runs, made = FakeRuns(by_rank, fails=("rank=8",)), members(folder, "model.rank=4,8")
    runs.failing_code = code
    sweep = SweepRun(members=made, folder=folder, start=runs.start, sleep=runs.sleep, at_once=2, report=lambda _: None)
    assert sweep.run()["rank=8"] == "failed"
    assert sweep.refused == ({"rank=8"} if code == REFUSED else set())


def test_run_that_learned_nothing_is_finished(folder):
    """It would do the same again."""
    runs, lines = FakeRuns(by_rank), list[str]()
    runs.last_code = TRAINED_NOTHING
    assert set(sweep(folder, runs, report=lines.append).values()) == {"finished"}
    assert "rank=1,seed=0: finished, and has learned nothing" in lines


@pytest.mark.parametrize("halving", [None, HALVING])
@pytest.mark.parametrize("sleeps", [1, 4])
def test_stopped_sweep_goes_on_to_the_same_outcome(folder, tmp_path, sleeps, halving):
    whole = SweepFolder(tmp_path / "whole")
    whole.path.mkdir()
    expected = sweep(whole, FakeRuns(by_rank), halving=halving)
    first, stop = FakeRuns(by_rank), StopSignal()
    first.stop_at = (sleeps, stop)
    assert "stopped" in sweep(folder, first, halving=halving, stop=stop).values()
    assert sweep(folder, FakeRuns(by_rank), halving=halving) == expected


def test_killed_sweep_goes_on_and_leaves_finished_runs_alone(folder):
    first = FakeRuns(by_rank)
    first.killed_at = 9
    with pytest.raises(Killed):
        sweep(folder, first, at_once=2)
    later = FakeRuns(by_rank)
    assert set(sweep(folder, later).values()) == {"finished"}
    assert 0 < len(later.started) < 8


def test_wider_sweep_starts_only_what_is_new(folder):
    sweep(folder, FakeRuns(by_rank), ("model.rank=1,2",))
    later = FakeRuns(by_rank)
    sweep(folder, later, ("model.rank=1,2,4",))
    assert later.started == ["rank=4"]


def test_other_rules_after_a_decision_are_refused(folder):
    sweep(folder, FakeRuns(by_rank), halving=HALVING)
    with pytest.raises(ConfigError, match="has ended runs by other rules: higher eval/reward/mean, 1 of 2"):
        sweep(folder, FakeRuns(by_rank))


def test_runs_are_divided_among_servers_and_stay_there(folder):
    runs, stop = FakeRuns(by_rank), StopSignal()
    runs.stop_at = (1, stop)
    sweep(folder, runs, ("model.rank=1,2,4",), servers=("http://a", "http://b"), stop=stop)
    assert list(runs.servers.values()) == ["http://a", "http://b", "http://a"]
    later = FakeRuns(by_rank)
    sweep(folder, later, ("model.rank=1,2,4",), servers=("http://b", "http://a"))
    assert later.servers == runs.servers


def test_server_with_checkpoints_cannot_be_left_out(folder):
    runs, stop = FakeRuns(by_rank), StopSignal()
    runs.stop_at = (1, stop)
    sweep(folder, runs, ("model.rank=1,2",), servers=("http://a",), stop=stop)
    with pytest.raises(ConfigError, match="rank=1 has begun on http://a"):
        sweep(folder, FakeRuns(by_rank), ("model.rank=1,2",))


def test_outcome_has_the_best_first_with_mean_and_deviation(folder):
    made = members(folder, *WORDS)
    statuses = sweep(folder, FakeRuns(by_rank), halving=HALVING)
    assert metric_of(made) == HELD_OUT_REWARD
    result = results.outcome(made, statuses, HELD_OUT_REWARD)
    assert [each.name for each in result.settings[:2]] == ["rank=8", "rank=4"]
    assert result.settings[0].mean == pytest.approx(8.13)
    assert result.settings[0].deviation == pytest.approx(0.0707, abs=1e-4)
    assert result.best == "rank=8,seed=1"
    results.write(folder, "small", result)
    read = json.loads(folder.results.read_text())
    assert [row["state"] for row in read["settings"]] == ["finished", *["ended early"] * 3]
    page = folder.page.read_text()
    assert "8.13 ± 0.071" in page
    assert page.count("<path") == 4


def test_outcome_without_values_names_no_best(folder):
    made = members(folder, "seed=0,1")
    result = results.outcome(made, {"seed=0": "failed", "seed=1": "failed"}, HELD_OUT_REWARD)
    assert result.best == ""
    results.write(folder, "small", result)
    assert json.loads(folder.results.read_text())["settings"][0]["mean"] is None
