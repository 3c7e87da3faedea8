"""Two evaluations of the same held-out tasks, compared: as a table, comparison.tsv and comparison.json.

A task's pass@1 is the share of its answers that are right, where a failed answer is not; its reward is the mean of its
answers that did not fail. A task all of whose answers failed has no reward. Predictions of an environment are compared
by their errors, such as the Brier score confidence/error (record/metrics.py); lower is better.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from tinsmith.atomic import atomic_write
from tinsmith.rl.record.layout import Layout
from tinsmith.rl.record.metrics import ERROR, is_right
from tinsmith.rl.record.monitors.jsonl import read_floats, read_rollouts
from tinsmith.rl.record.statistics import PairedComparison, compare
from tinsmith.rl.types import Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """Result of a model on one task."""

    task: str
    passed: float
    """Share of right answers."""
    reward: float | None
    errors: Mapping[str, float] = field(default_factory=dict)
    """Mean error of each prediction, by its name in the metrics: X/error."""
    judged: bool = False
    """Whether rewards or the workflow say of an answer whether it is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationComparison:
    """One measure of two models on the tasks of one source.

    Example: EvaluationComparison(first="step 0", second="step 60", source="", measure="reward", result=compare(a, b))
    """

    first: str
    second: str
    source: str
    """Name of the tasks; empty: all of them."""
    measure: str
    """pass@1, reward, or X/error of a prediction X."""
    result: PairedComparison

    @property
    def row(self) -> dict[str, Any]:
        """The comparison as one flat row."""
        names = {"first": self.first, "second": self.second, "source": self.source or "all", "measure": self.measure}
        values = {"first": "first_mean", "second": "second_mean"}
        return {**names, **{values.get(name, name): value for name, value in asdict(self.result).items()}}


Pair = tuple[TaskResult, TaskResult]


def results_of(groups: Sequence[Group], threshold: float) -> list[TaskResult]:
    """Results on the tasks of an evaluation, in order. `threshold` is `eval.threshold`."""
    return [_result(group.task.id, group.rollouts, threshold) for group in groups]


def read_results(file: Path, threshold: float) -> list[TaskResult]:
    """The results that a run wrote in `rollouts/eval-STEP.jsonl`."""
    groups: list[tuple[str, list[Rollout]]] = []
    for line in read_rollouts(file):
        if line["index"] == 0:
            groups.append((line["task"], []))
        rollout = Rollout.single((), line["reward"], correct=line.get("correct"), error=line["error"])
        groups[-1][1].append(replace(rollout, metrics=read_floats(line.get("metrics", {}))))
    return [_result(task, rollouts, threshold) for task, rollouts in groups]


def compare_results(
    first: tuple[str, Sequence[TaskResult]],
    second: tuple[str, Sequence[TaskResult]],
    sources: Sequence[str],
    seed: int,
) -> list[EvaluationComparison]:
    """Comparisons of two named evaluations, for all tasks and each of several sources; none if the tasks differ.

    `sources` is the name of the source of each task.
    """
    tasks = [[result.task for result in results] for _, results in (first, second)]
    if tasks[0] != tasks[1] or len(sources) != len(tasks[0]):
        return []
    names = list(dict.fromkeys(sources))
    comparisons = []
    for source in ["", *(names if len(names) > 1 else [])]:
        pairs = [
            pair for pair, name in zip(zip(first[1], second[1], strict=True), sources, strict=True)
            if source in ("", name)
        ]  # fmt: skip
        for measure, values in _measures(pairs, mixed=not source and len(names) > 1).items():
            if values:
                result = compare([a for a, _ in values], [b for _, b in values], seed)
                comparisons.append(
                    EvaluationComparison(
                        first=first[0], second=second[0], source=source, measure=measure, result=result
                    )
                )
    return comparisons


def compare_steps(
    folder: Path, last: int, threshold: float, sources: Sequence[str], seed: int
) -> list[EvaluationComparison]:
    """Compare the evaluations before the first step and after step `last`; none if they were not both made."""
    files = {step: Layout(folder).rollouts("eval", step) for step in (0, last)}
    if not last or not all(file.exists() for file in files.values()):
        return []
    first, second = ((f"step {step}", read_results(file, threshold)) for step, file in files.items())
    return compare_results(first, second, sources, seed)


def write(folder: Path, comparisons: Sequence[EvaluationComparison]) -> None:
    """Write comparison.json and comparison.tsv."""
    rows = [comparison.row for comparison in comparisons]
    lines = ["\t".join(rows[0]), *("\t".join(map(_cell, row.values())) for row in rows)] if rows else []
    atomic_write(Layout(folder).comparison, json.dumps(rows, indent=2).encode())
    atomic_write(Layout(folder).comparison_table, "".join(f"{line}\n" for line in lines).encode())


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows of comparison.json; none if there is no such file."""
    file = Layout(folder).comparison
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def print_tables(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table for each pair of models in the rows of comparison.json."""
    for first, second in dict.fromkeys((row["first"], row["second"]) for row in rows):
        table = Table(title=f"{second} against {first}", title_justify="left", box=box.SIMPLE_HEAD)
        for name in ("", first, second, "difference (95 %)", "p", "+/=/-"):
            table.add_column(name, no_wrap=bool(name), overflow="fold")
        for row in rows:
            if (row["first"], row["second"]) == (first, second):
                table.add_row(*_cells(row))
        console.print(table)


def _cells(row: Mapping[str, Any]) -> list[str]:
    source = "" if row["source"] == "all" else f"{row['source']} "
    return [
        f"{source}{row['measure']}",
        f"{row['first_mean']:.4g}",
        f"{row['second_mean']:.4g}",
        f"{row['difference']:+.3g} ({row['low']:+.2g} to {row['high']:+.2g})",
        f"{row['p_value']:.2g}",
        f"{row['wins']}/{row['ties']}/{row['losses']}",
    ]


def _measures(pairs: Sequence[Pair], *, mixed: bool) -> dict[str, list[tuple[float, float]]]:
    """Measure -> its values for both models on each task that has them; one that is not finite is no value.

    pass@1 is among them where something says what is right.

    Sources that are mixed may call different predictions by one name, so their errors are not among them.
    """
    rewards = [(a.reward, b.reward) for a, b in pairs if a.reward is not None and b.reward is not None]
    measures = {"reward": rewards}
    if any(each.judged or each.passed > 0 for pair in pairs for each in pair):
        measures = {"pass@1": [(a.passed, b.passed) for a, b in pairs], **measures}
    names = () if mixed else dict.fromkeys(name for each, _ in pairs for name in each.errors)
    for name in names:
        measures[name] = [(a.errors[name], b.errors[name]) for a, b in pairs if name in a.errors and name in b.errors]
    return {name: [pair for pair in values if all(map(math.isfinite, pair))] for name, values in measures.items()}


def _result(task: str, rollouts: Sequence[Rollout], threshold: float) -> TaskResult:
    good = [rollout for rollout in rollouts if not rollout.error]
    passed = float(np.mean([is_right(rollout, threshold) for rollout in rollouts]))
    reward = float(np.mean([rollout.reward for rollout in good])) if good else None
    names = dict.fromkeys(name for rollout in good for name in rollout.metrics if name.endswith(ERROR))
    errors = {name: float(np.mean([each.metrics[name] for each in good if name in each.metrics])) for name in names}
    judged = any(rollout.correct is not None for rollout in rollouts)
    return TaskResult(task=task, passed=passed, reward=reward, errors=errors, judged=judged)


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
