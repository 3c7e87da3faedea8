"""The index of rollouts equals a scan of the files, whatever happened to either."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinsmith.errors import ConfigError
from tinsmith.rl.history import RolloutFilter, RolloutIndex
from tinsmith.rl.record.layout import Layout
from tinsmith.rl.record.monitors.base import RunInfo
from tinsmith.rl.record.monitors.jsonl import JsonlMonitor
from tinsmith.rl.types import Group, Message, Rollout, Task, Trajectory, Turn


def turn(text: str, *, stop: Any = "stop", count: int = 2) -> Turn:
    return Turn(prompt=(1,), tokens=(2,) * count, logprobs=(-0.5,) * count, text=text, stop=stop)


def group(name: str, *rollouts: Rollout, environment: str = "") -> Group:
    task = Task(id=name, messages=(Message(role="user", content=f"Ask {name}"),), answer="52", environment=environment)
    return Group(task=task, rollouts=rollouts, version=3)


def record(folder: Path, steps: int = 3) -> RolloutIndex:
    """A run with the rollouts of `steps`, and of an evaluation."""
    monitor = JsonlMonitor(RunInfo(name="small", folder=folder, steps=steps))
    for step in range(1, steps + 1):
        judged = Rollout(
            trajectories=(
                Trajectory(turns=(turn("so it is 52"),), role="solver", reward=1.0),
                Trajectory(turns=(turn("GRÖSSE right"),), role="judge", reward=0.5),
            ),
            correct=True,
        )
        cut = Rollout.single((turn("and so on", stop="length", count=step),), 0.25)
        failed = Rollout.single(error="KeyError: x")
        monitor.rollouts(step, "train", [group("a/1", judged, cut), group("b/2", failed, cut, environment="maze")])
    monitor.rollouts(0, "eval", [group("held/1", Rollout.single((turn("x" * 5_000 + "needle"),), 0.0))])
    monitor.close()
    return RolloutIndex(Layout(folder))


def names(index: RolloutIndex, **conditions: Any) -> list[str]:
    return [row.id for row in index.find(RolloutFilter(**conditions)).rows]


@pytest.mark.parametrize(
    ("conditions", "selected"),
    [
        ({"kind": "eval"}, ["eval-0-0"]),
        ({"steps": (2, 2)}, ["train-2-0", "train-2-1", "train-2-2", "train-2-3"]),
        ({"steps": (3, None), "task": "A/"}, ["train-3-0", "train-3-1"]),
        ({"steps": (1, 1), "task_is": "a/1", "cut": True}, ["train-1-1"]),
        ({"role": "judge", "steps": (None, 1), "kind": "train"}, ["train-1-0"]),
        ({"role": "jud"}, []),
        ({"failed": True}, ["train-1-2", "train-2-2", "train-3-2"]),
        ({"correct": True, "steps": (1, 1)}, ["train-1-0"]),
        ({"environment": "maze", "steps": (2, 2)}, ["train-2-2", "train-2-3"]),
        ({"reward": (0.5, None)}, ["train-1-0", "train-2-0", "train-3-0"]),
        ({"reward": (None, 0.1), "failed": False}, ["eval-0-0"]),
        ({"search": "grösse", "steps": (3, 3)}, ["train-3-0"]),
        ({"search": "NEEDLE"}, ["eval-0-0"]),
        ({"search": "keyerror", "steps": (1, 2)}, ["train-1-2", "train-2-2"]),
        ({"search": "100%_'\""}, []),
    ],
)
def test_filters_select_rollouts(tmp_path: Path, conditions: dict[str, Any], selected: list[str]) -> None:
    assert names(record(tmp_path), **conditions) == selected


def test_rows_have_what_lists_show(tmp_path: Path) -> None:
    index = record(tmp_path)
    first, cut, failed, _ = index.find(RolloutFilter(steps=(2, 2))).rows
    assert (first.roles, first.reward, first.correct, first.turns, first.tokens) == (
        ("solver", "judge"),
        0.75,
        True,
        2,
        4,
    )
    assert (cut.cut, cut.preview, cut.group, cut.index, cut.version) == (True, "and so on", 0, 1, 3)
    assert (failed.failed, failed.preview, failed.environment, failed.task) == (True, "KeyError: x", "maze", "maze/b/2")
    assert [row.id for row in index.group(cut)] == ["train-2-0", "train-2-1"]
    assert index.read(first)["trajectories"][1]["turns"][0]["text"] == "GRÖSSE right"
    assert (index.row("train-2-1"), index.row("train-2-9"), index.row("train-2"), index.row("x-1-1")) == (
        cut, None, None, None,
    )  # fmt: skip
    assert index.values("roles") == ["judge", "policy", "solver"]


def test_pages_are_sorted_with_missing_values_last(tmp_path: Path) -> None:
    index = record(tmp_path)
    page = index.find(RolloutFilter(kind="train"), sort="reward", descending=True, limit=2, offset=2)
    assert ([row.id for row in page.rows], page.total, page.complete) == (["train-3-0", "train-1-1"], 12, True)
    assert [row.tokens for row in index.find(sort="tokens", limit=4).rows] == [0, 0, 0, 1]
    with pytest.raises(ConfigError, match="not sorted by '1; DROP'"):
        index.find(sort="1; DROP")  # type: ignore[arg-type]


def test_pages_of_a_search_have_its_total(tmp_path: Path) -> None:
    index = record(tmp_path)
    page = index.find(RolloutFilter(search="52"), sort="reward", descending=True, limit=2, offset=2)
    assert ([row.id for row in page.rows], page.total) == (["train-3-0", "train-1-1"], 13)
    assert index.find(RolloutFilter(search="52"), offset=13).total == 13


def delete(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def overwrite(file: Path) -> None:
    file.write_bytes(b"no index" * 2_000)


def garble(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:4_096] + bytes(len(content) - 4_096))


def other_version(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:60] + b"\0\0\0\x63" + file.read_bytes()[64:])


def forbid(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("damage", [delete, truncate, overwrite, garble, other_version, forbid])
def test_damaged_index_is_rebuilt(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    whole = record(tmp_path).find().rows
    damage(Layout(tmp_path).rollout_index)
    index = RolloutIndex(Layout(tmp_path))
    assert index.find().rows == whole
    assert index.find().rows == whole


def test_index_follows_the_files(tmp_path: Path) -> None:
    index = record(tmp_path)
    assert index.find().total == 13
    Layout(tmp_path).rollouts("train", 3).unlink()
    assert index.find().total == 9
    lines = Layout(tmp_path).rollouts("train", 2).read_bytes().splitlines(keepends=True)
    Layout(tmp_path).rollouts("train", 4).write_bytes(b"".join([*lines[:2], b'[1]\n{"task": "torn', b"\xff\n"]))
    assert names(index, steps=(4, 4)) == ["train-4-0", "train-4-1", "train-4-2", "train-4-3"]
    assert index.read(index.find(RolloutFilter(steps=(4, 4))).rows[3]) == {}
    shutil.copytree(tmp_path, tmp_path / "copy", copy_function=shutil.copyfile, ignore=lambda *_: {"copy"})
    assert RolloutIndex(Layout(tmp_path / "copy")).find().rows == index.find().rows


def test_cold_index_is_built_newest_first_in_parts(tmp_path: Path) -> None:
    index = record(tmp_path)
    delete(Layout(tmp_path).rollout_index)
    first = index.find(seconds=0.0)
    assert (first.total, first.indexed, first.files, first.complete) == (0, 0, 4, False)
    assert index.find(RolloutFilter(steps=(2, 2))).complete
    assert index.find().total == 13


def test_lines_of_other_writers_are_taken_as_they_are(tmp_path: Path) -> None:
    file = Layout(tmp_path).rollouts("train", 1)
    file.parent.mkdir()
    values = [None, [], {}, 1, 1e400, "\ud800\0", True, 2**70]
    keys = ("task", "index", "reward", "text", "error", "correct", "trajectories", "messages", "group", "version")
    rows = [dict.fromkeys(keys, value) for value in values]
    rows += [{"task": "t", "index": index, "trajectories": [{"turns": [value]}]} for index, value in enumerate(values)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = RolloutIndex(Layout(tmp_path))
    assert index.find(limit=100).total == len(rows)
    assert len(index.group(index.find(limit=100).rows[-1])) == len(values)
