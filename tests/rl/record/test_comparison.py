"""Evaluations before and after training, and of checkpoints, are compared task by task."""

from __future__ import annotations

import csv
import json
import math

import pytest

from tests.rl.scripted_run import run, settings
from tests.rl.test_bench import compared
from tinsmith.chat.strict_json import parse_json
from tinsmith.rl.config import RunConfig
from tinsmith.rl.record import comparison
from tinsmith.rl.record.comparison import TaskResult, compare_results


def test_run_compares_its_first_and_last_evaluation(tmp_path):
    config = settings(
        tmp_path, steps=30, eval={"every": 0, "temperature": 1.0, "num_samples": 4}, monitors=[{"type": "report"}]
    )
    run(config)
    rows = json.loads((tmp_path / "comparison.json").read_text())
    assert [(row["first"], row["second"], row["source"], row["measure"]) for row in rows] == [
        ("step 0", "step 30", "all", "pass@1"), ("step 0", "step 30", "all", "reward"),
    ]  # fmt: skip
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    metrics = {row["step"]: row for row in map(json.loads, lines) if "eval/pass@1" in row}
    assert rows[0]["first_mean"] == pytest.approx(metrics[0]["eval/pass@1"])
    assert rows[0]["second_mean"] == pytest.approx(metrics[30]["eval/pass@1"])
    assert rows[0]["low"] <= rows[0]["difference"] <= rows[0]["high"]
    with (tmp_path / "comparison.tsv").open() as file:
        written = list(csv.DictReader(file, delimiter="\t"))
    assert [row["measure"] for row in written] == ["pass@1", "reward"]
    assert float(written[1]["difference"]) == pytest.approx(rows[1]["difference"], rel=1e-5)
    assert "task by task" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("change", [{"compare": False}, {"before": False}])
def test_run_without_both_evaluations_compares_nothing(tmp_path, change):
    run(settings(tmp_path, steps=2, eval=change))
    assert comparison.read(tmp_path) == []


def test_bench_compares_checkpoints_with_the_first(tmp_path):
    state = run(settings(tmp_path, steps=30))
    results, shown = compared(settings(tmp_path, mode="bench", eval={"temperature": 1.0, "num_samples": 8}), tmp_path)
    rows = comparison.read(tmp_path / "bench")
    assert [(row["first"], row["second"]) for row in rows] == [("scripted", state.sampling_path)] * 2
    expected = results[1]["eval/pass@1"] - results[0]["eval/pass@1"]
    assert rows[0]["difference"] == pytest.approx(expected)
    assert "2 against 1" in shown


def test_accuracy_is_compared_where_something_says_what_is_right():
    def measures(*, passed: float = 0.0, judged: bool = False) -> list[str]:
        results = [TaskResult(task=str(at), passed=passed, reward=0.5, judged=judged) for at in range(3)]
        return [each.measure for each in compare_results(("a", results), ("b", results), ["x"] * 3, 0)]

    assert measures() == ["reward"]
    assert measures(judged=True) == measures(passed=0.5) == ["pass@1", "reward"]


def test_results_that_are_not_finite_are_not_compared(tmp_path):
    values = (math.nan, math.inf, 0.5)
    results = [
        TaskResult(task=str(at), passed=0.0, reward=v, errors={"p/error": v}, judged=True)
        for at, v in enumerate(values)
    ]
    comparisons = compare_results(("a", results), ("b", results), ["x"] * 3, 0)
    comparison.write(tmp_path, comparisons)
    rows = parse_json((tmp_path / "comparison.json").read_bytes())
    assert [(row["measure"], row["tasks"], row["first_mean"]) for row in rows] == [
        ("pass@1", 3, 0.0), ("reward", 1, 0.5), ("p/error", 1, 0.5),
    ]  # fmt: skip
    assert not compare_results(("a", results[:1]), ("b", results[:1]), ["x"], 0)[1:]


def test_sources_are_compared_apart_and_failures_left_out():
    def results(*values: float | None) -> list[TaskResult]:
        return [TaskResult(task=str(number), passed=value or 0.0, reward=value) for number, value in enumerate(values)]

    first, second = results(0.0, 1.0, 0.5, None), results(1.0, 1.0, 0.0, 1.0)
    rows = [each.row for each in compare_results(("a", first), ("b", second), ["x", "x", "y", "y"], 0)]
    assert [(row["source"], row["measure"], row["tasks"], round(row["difference"], 6)) for row in rows] == [
        ("all", "pass@1", 4, 0.375), ("all", "reward", 3, 0.166667),
        ("x", "pass@1", 2, 0.5), ("x", "reward", 2, 0.5),
        ("y", "pass@1", 2, 0.25), ("y", "reward", 1, -0.5),
    ]  # fmt: skip
    assert compare_results(("a", first), ("b", second[:3]), ["x"] * 4, 0) == []


def test_environments_are_compared_by_errors_of_predictions(tmp_path):
    environment = {"type": "self_prediction", "style": "short", "size": 20, "held_out": 6}
    shared = settings(tmp_path, steps=2, eval={"every": 0}).model_dump(exclude={"tasks", "rewards"}, exclude_unset=True)
    products = {**environment, "name": "products", "operations": ["*"], "weight": 0}
    run(RunConfig.model_validate({**shared, "environments": [environment, products]}))
    rows = comparison.read(tmp_path)
    assert [(row["source"], row["measure"]) for row in rows] == [
        ("all", "pass@1"), ("all", "reward"),
        *(("self_prediction", measure) for measure in ("pass@1", "reward", "confidence/error")),
        *(("products", measure) for measure in ("pass@1", "reward", "confidence/error")),
    ]  # fmt: skip
    lines = map(json.loads, (tmp_path / "rollouts" / "eval-000002.jsonl").read_text().splitlines())
    briers = [line["metrics"]["confidence/error"] for line in lines if line["task"].startswith("products/")]
    assert rows[-1]["second_mean"] == pytest.approx(sum(briers) / 6)
