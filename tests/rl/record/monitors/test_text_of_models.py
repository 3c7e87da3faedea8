"""Files of a run are valid JSON lines and the report reads them, whatever text and numbers rollouts hold."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.rl.scripted_run import settings
from tinsmith.chat.strict_json import parse_json
from tinsmith.rl.guards.user_code import describe
from tinsmith.rl.record.comparison import read_results
from tinsmith.rl.record.monitors.base import RunInfo
from tinsmith.rl.record.monitors.jsonl import JsonlMonitor, read_metrics, read_rollouts
from tinsmith.rl.record.monitors.report import write
from tinsmith.rl.types import Group, Message, Rollout, Task, Turn
from tinsmith.rl.workflows.results import checked

TEXT = 'a\u2028b\x85c\x1ed\r"😀\N{REPLACEMENT CHARACTER}\0<script>'
"""Characters at which str.splitlines ends a line, and others that files could trip over."""


def turn(text: str, logprob: float = -1.0) -> Turn:
    return Turn(prompt=(1,), tokens=(2,), logprobs=(logprob,), text=text, stop="stop")


def test_files_of_a_run_are_valid_json_lines(tmp_path: Path) -> None:
    config = settings(tmp_path, steps=2)
    info = RunInfo(name="small", folder=tmp_path, steps=2, settings=config.model_dump(mode="json"))
    task = Task(id="t", messages=(Message(role="user", content=TEXT),), answer=TEXT)
    good = Rollout.single((turn(TEXT, math.nan),), 1.0)
    failed = Rollout.single((turn(TEXT, -math.inf),), math.nan, error=TEXT)
    monitor = JsonlMonitor(info)
    for step, kind in ((0, "eval"), (1, "train"), (1, "eval")):
        monitor.rollouts(step, kind, [Group(task=task, rollouts=(good, failed), version=0)])
    monitor.metrics(1, {"reward/mean": 0.5, "loss": math.nan, "grad_norm": math.inf, "x\ud83d": 1})
    monitor.close()
    for file in tmp_path.rglob("*.jsonl"):
        for line in file.read_bytes().removesuffix(b"\n").split(b"\n"):
            parse_json(line)
    first, second = read_rollouts(tmp_path / "rollouts" / "eval-000001.jsonl")
    assert (first["text"], second["error"], first["reward"]) == (TEXT, TEXT, 1.0)
    assert math.isnan(second["reward"])
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row["loss"])
    assert row["reward/mean"] == 0.5
    assert len(read_results(tmp_path / "rollouts" / "eval-000000.jsonl", 1.0)) == 1
    write(info)
    assert "<script>alert" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_errors_of_user_code_can_be_written() -> None:
    assert describe(KeyError("\ud83d")) == "KeyError: '\\ud83d'"
    assert describe(ValueError("a\ud83d")) == "ValueError: a\N{REPLACEMENT CHARACTER}"
    (rollout,) = checked([Rollout(error="a\ud83d")], 1)
    assert rollout.error == "a\N{REPLACEMENT CHARACTER}"


def test_half_a_surrogate_pair_fails_its_rollout_by_name() -> None:
    (rollout,) = checked([Rollout.single((turn("a\ud83d"),), 1.0)], 1)
    assert "the text of a turn is no text: it holds \\ud83d, which is half a surrogate pair" in str(rollout.error)
    (rollout,) = checked([Rollout.single((turn("a"),), 1.0, reward_parts={"\udc00": 1.0})], 1)
    assert "the name of a reward part" in str(rollout.error)
    with pytest.raises(ValueError, match=r"the content of a message is no text: it holds \\udc00"):
        Message(role="tool", content="\udc00")
