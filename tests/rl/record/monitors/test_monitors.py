"""Monitors show a run and never stop it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import shutil
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from tests.rl.scripted_run import Killed, breaking, rows, run, scripted, settings
from tinsmith.chat.strict_json import parse_json
from tinsmith.rl.ending.stop import StopSignal
from tinsmith.rl.record.monitors import charts
from tinsmith.rl.record.monitors.base import Monitor, Monitors, RunInfo
from tinsmith.rl.record.monitors.console import ConsoleConfig, ConsoleMonitor
from tinsmith.rl.record.monitors.jsonl import JsonlMonitor, read_metrics
from tinsmith.rl.record.monitors.report import write
from tinsmith.rl.run.loop import train
from tinsmith.rl.types import Group, Rollout, Task, Turn
from tinsmith.rl.workflows.base import WorkflowPolicy


def shown(tmp_path, *, terminal: bool = False, **changes) -> str:
    """Console output of a run."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    run(settings(tmp_path, monitors=[{"type": "console"}], **changes), console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_console_shows_steps_and_evaluations(tmp_path):
    text = shown(tmp_path)
    assert "held out before training: reward 0.000  of 5 tasks" in text  # nothing says what is right
    assert "held out after step 8: pass@1 1.000  reward 1.000  of 5 tasks" in text
    assert re.search(r"step 8/8  reward  \d\.\d{3} █", text)
    assert "tok/s" in text


@pytest.mark.parametrize(("values", "speed"), [({}, "    30 tok/s"), ({"reward/mean": 0.5}, "     2 tok/s")])
def test_console_shows_speed_of_what_a_step_does(tmp_path, values, speed):
    console = Console(file=io.StringIO(), width=120)
    monitor = ConsoleMonitor(ConsoleConfig(), RunInfo(name="small", folder=tmp_path, steps=1), console)
    # Without rollouts, the tokens that were sampled are those of an evaluation.
    speeds = {"speed/sampled_tokens_per_second": 2.0, "speed/trained_tokens_per_second": 30.0}
    monitor.metrics(1, {**values, **speeds, "time/step": 1.0})
    assert isinstance(console.file, io.StringIO)
    assert speed in console.file.getvalue()


def test_console_shows_a_progress_bar_in_a_terminal(tmp_path):
    text = shown(tmp_path, terminal=True)
    assert "8/8" in text
    assert "left" in text


def test_console_shows_about_30_lines_for_long_runs(tmp_path):
    text = shown(tmp_path, steps=100, eval={"every": 0, "before": False, "after": False})
    assert 30 <= text.count("tok/s") <= 40


def test_failing_monitor_is_logged_and_others_continue(caplog):
    steps = []

    class Broken(Monitor):
        def metrics(self, step, values):
            raise OSError("disk full")

        def rollouts(self, step, kind, groups): ...

        def close(self): ...

    class Good(Broken):
        def metrics(self, step, values):
            steps.append(step)

    with caplog.at_level(logging.WARNING):
        Monitors([Broken(), Good()]).metrics(3, {})
    assert steps == [3]
    assert "The monitor Broken failed: OSError: disk full" in caplog.text


def test_read_metrics_joins_rows_of_a_step(finished):
    joined = read_metrics(finished)
    assert [row["step"] for row in joined] == list(range(9))
    assert {"reward/mean", "eval/pass@1"} <= joined[4].keys()
    assert len(joined) < len(rows(finished))


def test_report_is_self_contained_and_shows_the_run(finished):
    page = (finished / "report.html").read_text()
    assert not re.search(r"src\s*=|href\s*=\s*\"[^#]|@import|url\(", page)
    assert 'http-equiv="refresh"' not in page
    for words in (
        "Reward",
        "Held-out accuracy",
        "Entropy",
        "KL sampler to trainer",
        "Gradient norm",
        "before training",
    ):
        assert words in page
    assert "0.000 → 1.000" in page
    assert "learning_rate: 0.2" in page
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(chart)


class GuessAndCheck:
    """Two guesses and a check of them, by the same policy."""

    async def run(self, task: Task, policy: WorkflowPolicy) -> Rollout:
        guesses = [policy.conversation("guess") for _ in range(2)]
        for guess in guesses:
            guess.reward = float((await guess.say(*task.messages)).text == "yes")
        check = policy.conversation("check")
        await check.say("Is one of them yes?")
        await check.say("Are you sure?")
        check.credit(0.125)
        return policy.rollout(correct=guesses[0].reward == 1.0, metrics={"guesses": 2})


def test_monitors_show_each_role(tmp_path):
    workflow = {"type": "custom", "path": GuessAndCheck}
    text = shown(tmp_path / "console", workflow=workflow, rewards=[])
    assert re.search(r"step 8/8  reward  \d\.\d{3} .*  guess \d\.\d{3}  check 0\.125  ", text)
    assert re.search(r"after step 8: pass@1 \d\.\d{3}  guess \d\.\d{3}  check 0\.125", text)
    run(settings(tmp_path / "report", workflow=workflow, rewards=[], monitors=[{"type": "report"}]))
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Reward by role" in page
    assert "Held-out reward by role" in page
    groups = page[page.index("one task, several replies") :].split("<h3>Step ")[1:]
    assert [group.partition("<")[0] for group in groups] == ["8", "6", "3", "1"]  # four of the eight steps
    group = groups[0]
    assert group.count(">guess</span>") == 2 * group.count(">check</span>") == 2 * 4
    assert group.count("<b>answer</b> right") + group.count("<b>answer</b> wrong") == 4
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(chart)


def test_report_says_how_the_run_ended(finished, tmp_path):
    assert "finished, 6 updates" in (finished / "report.html").read_text()
    report, until = tmp_path / "report.html", {"metric": "reward/mean", "at_least": 0.0}
    config = settings(tmp_path, until=until, monitors=[{"type": "report"}])
    asyncio.run(train(config, scripted(tmp_path), Console(quiet=True), StopSignal(0.0)))
    assert "stopped by its time limit after step 0 of 8" in report.read_text()
    with pytest.raises(Killed):
        run(config, breaking(tmp_path, calls=0, at="train"))
    assert "not finished" in report.read_text()
    assert run(config).step == 1
    assert "finished, 1 update<" in report.read_text()


def test_report_of_one_role_has_no_roles(finished):
    page = (finished / "report.html").read_text()
    assert "by role" not in page
    assert 'class="ro-role">policy' not in page


SCRIPT = {"role": "policy", "turns": [{"text": "<script>alert(1)</script>", "tokens": [1]}]}


def test_report_cuts_long_replies(finished, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    for file in (copy / "rollouts").glob("*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line["trajectories"] = [{"role": "policy", "turns": [{"text": "word " * 40_000, "tokens": [1]}]}]
        file.write_text("\n".join(map(json.dumps, lines)))
    write(RunInfo(name="small", folder=copy, steps=8, settings={**settings(copy).model_dump(mode="json")}))
    page = (copy / "report.html").read_text()
    assert "more characters" in page
    assert len(page) < 2_000_000


def test_report_escapes_sampled_text(tmp_path):
    config = settings(tmp_path, steps=2)
    run(config)
    file = tmp_path / "rollouts" / "eval-000000.jsonl"
    lines = [{**json.loads(line), "trajectories": [SCRIPT]} for line in file.read_text().splitlines()]
    file.write_text("\n".join(map(json.dumps, lines)))
    write(RunInfo(name="small", folder=tmp_path, steps=2, settings=config.model_dump(mode="json")))
    page = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


@pytest.mark.parametrize(
    "points", [((1.0, 0.5),), ((1.0, 0.0), (2.0, 0.0)), ((0.0, 1e-9), (50.0, 3e-9)), ((1.0, -5e6), (2.0, 7e6))]
)
def test_charts_stay_within_their_frame(points):
    drawn = charts.svg([charts.Curve(name="x", points=points, dots=True)], floor=0.0)
    root = ElementTree.fromstring(drawn)
    for circle in root.iter("circle"):
        assert 0 <= float(circle.attrib["cx"]) <= charts.WIDTH
        assert 0 <= float(circle.attrib["cy"]) <= charts.HEIGHT


def test_chart_without_finite_points_is_empty():
    assert charts.svg([charts.Curve(name="x", points=())]) == ""
    assert charts.svg([charts.Curve(name="x", points=((1.0, float("nan")),))]) == ""


def test_data_of_a_chart_has_only_finite_points():
    points = ((1.0, 0.5), (2.0, float("nan")), (3.0, float("inf")), (4.0, 0.7))
    drawn = ElementTree.fromstring(charts.svg([charts.Curve(name="x", points=points)]))
    (curve,) = parse_json(drawn.attrib["data-curves"])
    assert [(step, value) for _, _, step, value in curve["at"]] == [(1.0, 0.5), (4.0, 0.7)]


def test_smoothing_keeps_a_constant_curve():
    level = tuple((float(x), 2.0) for x in range(50))
    assert charts.smooth(level) == level


def inputs(file) -> list[str | None]:
    """The input of every turn."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [turn["input"] for line in lines for trajectory in line["trajectories"] for turn in trajectory["turns"]]


def test_rollouts_have_the_text_that_was_sent(tmp_path):
    config = settings(tmp_path, steps=1, workflow={"type": "single_turn", "system": "Be brief. "})
    run(config)
    file = tmp_path / "rollouts" / "train-000001.jsonl"
    tasks = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert inputs(file) == [f"Be brief. {message['content']}" for messages in tasks for message in messages]


def test_input_of_a_continued_turn_is_what_was_added(tmp_path):
    def turn(prompt: str, reply: str, model: str = "") -> Turn:
        before, tokens = tuple(map(ord, prompt)), tuple(map(ord, reply))
        return Turn(prompt=before, tokens=tokens, logprobs=(0.0,) * len(tokens), text="", stop="stop", model=model)

    turns = (turn("Go.", "left"), turn("Go.leftA wall.", "up"), turn("Again.", "up"), turn("Judge.", "1", "large"))
    group = Group(task=Task(id="t", messages=()), rollouts=(Rollout.single(turns),))
    for name, decode, sent in (
        ("with", lambda tokens: "".join(map(chr, tokens)), ["Go.", "A wall.", "Again.", None]),
        ("without", None, [None] * 4),
    ):
        monitor = JsonlMonitor(RunInfo(name="small", folder=tmp_path / name, steps=1, decode=decode))
        monitor.rollouts(1, "train", [group])
        monitor.close()
        assert inputs(tmp_path / name / "rollouts" / "train-000001.jsonl") == sent
