"""Mode bench compares checkpoints on the held-out tasks with equal seeds."""

from __future__ import annotations

import asyncio
import io
import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from tests.rl.scripted_run import REPLIES, Killed, breaking, run, settings
from tinsmith.chat.strict_json import parse_json
from tinsmith.errors import ConfigError
from tinsmith.rl.bench import bench
from tinsmith.rl.evaluate import Evaluator
from tinsmith.rl.run.parts import with_fresh_folder
from tinsmith.rl.run.state import read_state
from tinsmith.testing import ScriptedPolicy


class PathPolicy(ScriptedPolicy):
    """Opens its saved weights by path, as a server does."""

    async def open_model(self, name: str):
        return await (self.open_checkpoint(name, 0) if "/" in name else super().open_model(name))


def compared(config, folder) -> tuple[list[dict], str]:
    """Rows of the comparison of the run in `folder`, and the console output."""
    shown = io.StringIO()

    async def connect():
        return PathPolicy(REPLIES, folder / "weights")

    rows = asyncio.run(bench(config, connect, Console(file=shown, width=80), of=folder))
    return rows, shown.getvalue()


def test_base_model_and_last_checkpoint_are_compared(tmp_path):
    state = run(settings(tmp_path, steps=30, checkpoint={"every": 5}))
    config = settings(tmp_path, steps=30, mode="bench", eval={"temperature": 1.0, "num_samples": 8})
    results, shown = compared(config, tmp_path)
    assert [row["checkpoint"] for row in results] == ["scripted", state.sampling_path]
    assert results[0]["eval/pass@1"] < 0.6 < 0.9 < results[1]["eval/pass@1"]
    assert json.loads((tmp_path / "bench" / "results.json").read_text()) == results
    assert len((tmp_path / "bench" / "rollouts" / "eval-000002.jsonl").read_text().splitlines()) == 5 * 8
    assert f"1  scripted\n2  {state.sampling_path}\n" in shown
    assert re.search(rf"pass@1 .* {results[0]['eval/pass@1']:.4g} .* {results[1]['eval/pass@1']:.4g} ", shown)
    assert "…" not in shown
    again, _ = compared(config, tmp_path)
    assert again == results


def test_metric_that_is_not_finite_is_null_in_the_results(tmp_path, monkeypatch):
    evaluate = Evaluator.run

    async def with_nan(self, *args):
        evaluation = await evaluate(self, *args)
        return replace(evaluation, values={**evaluation.values, "eval/calibration": math.nan})

    monkeypatch.setattr(Evaluator, "run", with_nan)
    results, shown = compared(settings(tmp_path, mode="bench"), tmp_path)
    assert math.isnan(results[0]["eval/calibration"])
    assert "nan" in shown
    (row,) = parse_json((tmp_path / "bench" / "results.json").read_bytes())
    assert row["eval/calibration"] is None


def test_of_run_all_compares_every_checkpoint_oldest_first(tmp_path):
    state = run(settings(tmp_path, steps=6, checkpoint={"every": 2}))
    config = settings(tmp_path, mode="bench", bench={"of_run": "all", "base": False})
    results, _ = compared(config, tmp_path)
    saved = [paths[0] for paths in state.checkpoints]
    assert len(saved) == 3
    assert [row["checkpoint"] for row in results] == [*saved[:2], state.sampling_path]


@pytest.mark.parametrize(("of_run", "count"), [("last", 1), ("all", 2)])
def test_checkpoints_of_an_interrupted_run_are_compared(tmp_path, of_run, count):
    with pytest.raises(Killed):
        run(settings(tmp_path, steps=50, checkpoint={"every": 2}), breaking(tmp_path, calls=2, at="save"))
    state = read_state(tmp_path)
    assert state is not None
    config = settings(tmp_path, mode="bench", bench={"of_run": of_run, "base": False})
    results, _ = compared(config, tmp_path)
    assert [row["checkpoint"] for row in results] == [paths[0] for paths in state.checkpoints][-count:]
    assert len(results) == count


def test_comparison_without_checkpoints_says_so(tmp_path):
    results, shown = compared(settings(tmp_path, mode="bench"), tmp_path)
    assert [row["checkpoint"] for row in results] == ["scripted"]
    assert f"Only the base model is evaluated: {tmp_path} holds no checkpoint." in shown


def test_resume_refuses_or_renames_an_existing_comparison(tmp_path):
    run(settings(tmp_path / "run", steps=2))
    config = settings(tmp_path / "run", mode="bench", eval={})
    first, _ = compared(config, tmp_path / "run")
    with pytest.raises(ConfigError, match="already holds a run"):
        compared(settings(tmp_path / "run", mode="bench", eval={}, resume=False), tmp_path / "run")
    config = settings(tmp_path / "run", mode="bench", eval={}, resume="rename")
    again, _ = compared(with_fresh_folder(config, "bench"), tmp_path / "run")
    assert again == first
    assert len(list(tmp_path.glob("run_*/bench/results.json"))) == 1


def test_comparison_needs_only_eval_tasks(tmp_path):
    run(settings(tmp_path, steps=2))
    config = settings(tmp_path, mode="bench", tasks={"eval": {"type": "addition", "high": 11}}, steps=0, group_size=2)
    results, _ = compared(config, tmp_path)
    assert [row["eval/tasks"] for row in results] == [4, 4]


def test_listed_checkpoints_are_compared_without_the_base(tmp_path):
    run(settings(tmp_path / "run", steps=4, sync={"method": "checkpoint"}))
    paths = sorted(str(file) for file in (tmp_path / "run" / "weights").glob("sync-*"))
    config = settings(tmp_path / "bench", mode="bench", bench={"checkpoints": paths, "base": False})
    results, _ = compared(config, tmp_path / "bench")
    assert [row["checkpoint"] for row in results] == paths
    assert len(paths) > 1


def test_comparison_of_nothing_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no model to compare"):
        compared(settings(tmp_path, mode="bench", bench={"base": False}), tmp_path)
