"""Checkpoints are compared on the held-out tasks, with the same seeds."""

from __future__ import annotations

import asyncio
import io
import json
import re

import pytest
from rich.console import Console

from tests.rl.scripted_run import REPLIES, Killed, breaking, run, settings
from tinsmith.errors import ConfigError
from tinsmith.rl.bench import bench
from tinsmith.rl.policy.scripted import ScriptedPolicy
from tinsmith.rl.run_folder import read_state


class Paths(ScriptedPolicy):
    """Opens its own files by their paths, as a server does."""

    async def open_model(self, name: str):
        return await (self.open_checkpoint(name, 0) if "/" in name else super().open_model(name))


def compared(config, folder) -> tuple[list[dict], str]:
    shown = io.StringIO()

    async def connect():
        return Paths(REPLIES, folder / "weights")

    rows = asyncio.run(bench(config, connect, Console(file=shown, width=80)))
    return rows, shown.getvalue()


def test_the_base_and_the_runs_last_weights_are_compared(tmp_path):
    state = run(settings(tmp_path, steps=30, checkpoint={"every": 5}))
    config = settings(tmp_path, steps=30, mode="bench", eval={"temperature": 1.0, "num_samples": 8})
    found, shown = compared(config, tmp_path)
    assert [row["checkpoint"] for row in found] == ["scripted", state.sampling_path]
    assert found[0]["eval/pass@1"] < 0.6 < 0.9 < found[1]["eval/pass@1"]
    assert json.loads((tmp_path / "bench" / "results.json").read_text()) == found
    assert len((tmp_path / "bench" / "rollouts" / "eval-000002.jsonl").read_text().splitlines()) == 5 * 8
    assert f"1  scripted\n2  {state.sampling_path}\n" in shown
    assert re.search(rf"pass@1 .* {found[0]['eval/pass@1']:.4g} .* {found[1]['eval/pass@1']:.4g} ", shown)
    assert "…" not in shown
    again, _ = compared(config, tmp_path)
    assert again == found


def test_all_that_a_run_saved_is_compared_oldest_first(tmp_path):
    state = run(settings(tmp_path, steps=6, checkpoint={"every": 2}))
    config = settings(tmp_path, mode="bench", bench={"of_run": "all", "base": False})
    found, _ = compared(config, tmp_path)
    saved = [paths[0] for paths in state.checkpoints]
    assert len(saved) == 3
    assert [row["checkpoint"] for row in found] == [*saved[:2], state.sampling_path]


@pytest.mark.parametrize(("of_run", "count"), [("last", 1), ("all", 2)])
def test_the_checkpoints_of_a_run_that_was_broken_off_are_compared(tmp_path, of_run, count):
    with pytest.raises(Killed):
        run(settings(tmp_path, steps=50, checkpoint={"every": 2}), breaking(tmp_path, calls=2, at="save"))
    state = read_state(tmp_path)
    assert state is not None
    config = settings(tmp_path, mode="bench", bench={"of_run": of_run, "base": False})
    found, _ = compared(config, tmp_path)
    assert [row["checkpoint"] for row in found] == [paths[0] for paths in state.checkpoints][-count:]
    assert len(found) == count


def test_the_base_alone_is_said_to_be_alone(tmp_path):
    found, shown = compared(settings(tmp_path, mode="bench"), tmp_path)
    assert [row["checkpoint"] for row in found] == ["scripted"]
    assert f"The base model alone: {tmp_path} holds no checkpoint." in shown


def test_a_comparison_may_refuse_to_be_made_again_or_be_made_anew_beside_the_first(tmp_path):
    run(settings(tmp_path / "run", steps=2))
    config = settings(tmp_path / "run", mode="bench", eval={})
    first, _ = compared(config, tmp_path / "run")
    with pytest.raises(ConfigError, match="already holds a run"):
        compared(settings(tmp_path / "run", mode="bench", eval={}, resume=False), tmp_path / "run")
    again, _ = compared(settings(tmp_path / "run", mode="bench", eval={}, resume="rename"), tmp_path / "run")
    assert again == first
    assert len(list(tmp_path.glob("run_*/bench/results.json"))) == 1


def test_held_out_tasks_of_its_own_are_enough(tmp_path):
    run(settings(tmp_path, steps=2))
    config = settings(tmp_path, mode="bench", tasks={"eval": {"type": "addition", "high": 11}}, steps=0, group_size=2)
    found, _ = compared(config, tmp_path)
    assert [row["eval/tasks"] for row in found] == [4, 4]


def test_a_list_of_checkpoints_without_the_base(tmp_path):
    run(settings(tmp_path / "run", steps=4, sync={"method": "checkpoint"}))
    paths = sorted(str(file) for file in (tmp_path / "run" / "weights").glob("sync-*"))
    config = settings(tmp_path / "bench", mode="bench", bench={"checkpoints": paths, "base": False})
    found, _ = compared(config, tmp_path / "bench")
    assert [row["checkpoint"] for row in found] == paths
    assert len(paths) > 1


def test_nothing_to_compare_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nothing to compare"):
        compared(settings(tmp_path, mode="bench", bench={"base": False}), tmp_path)
