"""The scores of models on benchmarks: averages over attempts with intervals, and models compared problem by problem.

avg@k is the mean score of an answer; pass@k the probability that one of k answers is right, estimated without bias from
all of them; maj@k the score of the most frequent answer of k, the earliest of equally frequent ones. Intervals are
95 %, by a bootstrap over problems.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tinsmith.rl.record.metrics import pass_at_k
from tinsmith.rl.record.statistics import PairedComparison, compare, interval_of_mean

_RIGHT = 1.0 - 1e-9
"""A score from here on is a right answer."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One answer to a problem.

    Example: Attempt("18", 1.0)
    """

    answer: str
    """As the benchmark read it from the reply; empty if it says none."""
    score: float


Scores = Mapping[str, Mapping[str, Sequence[Attempt]]]
"""Benchmark and metric -> problem -> its attempts."""


def to_json(values: Mapping[str, Any]) -> bytes:
    """Values with scores among them as JSON: an attempt is the list of its answer and its score."""
    return json.dumps(values, default=lambda attempt: [attempt.answer, attempt.score]).encode()


def from_json(values: Mapping[str, Mapping[str, Sequence[tuple[str, float]]]]) -> Scores:
    """The scores that `to_json` has written."""
    return {
        benchmark: {name: [Attempt(*attempt) for attempt in attempts] for name, attempts in problems.items()}
        for benchmark, problems in values.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A measure of a model on a benchmark.

    Example: Estimate(model="tiny", benchmark="gsm8k", measure="pass@4", problems=100, mean=0.3, low=0.2, high=0.4)
    """

    model: str
    benchmark: str
    measure: str
    problems: int
    mean: float
    low: float
    high: float
    against_first: PairedComparison | None = None
    """Compared with the first model on the same problems; None for the first model."""

    @property
    def row(self) -> dict[str, Any]:
        """The estimate as JSON has it."""
        return asdict(self)


def estimates(models: Mapping[str, Scores], seed: int = 0) -> list[Estimate]:
    """Every measure of every model, of which the first is the one that others are compared with."""
    first = next(iter(models.values()), {})
    graded = {
        name for scores in models.values() for name, problems in scores.items() if not _is_right_or_wrong(problems)
    }
    rows = []
    for number, (model, scores) in enumerate(models.items()):
        for benchmark, problems in scores.items():
            before = first.get(benchmark, {}) if number else {}
            common = [name for name in problems if name in before]
            of_right = benchmark not in graded
            old = measures({name: before[name] for name in common}, of_right=of_right)
            for measure, values in measures(problems, of_right=of_right).items():
                low, high = interval_of_mean(list(values.values()), seed)
                pairs = [(old[measure][name], values[name]) for name in common] if measure in old else []
                rows.append(
                    Estimate(
                        model=model,
                        benchmark=benchmark,
                        measure=measure,
                        problems=len(values),
                        mean=sum(values.values()) / len(values),
                        low=low,
                        high=high,
                        against_first=compare([a for a, _ in pairs], [b for _, b in pairs], seed) if pairs else None,
                    )
                )
    return rows


def measures(problems: Mapping[str, Sequence[Attempt]], *, of_right: bool = True) -> dict[str, dict[str, float]]:
    """Measure -> its value for each problem. With one attempt, or scores other than right and wrong, the mean alone.

    `of_right`: whether the scores of other models are right or wrong too, which shall have the same measures.
    """
    k = min((len(attempts) for attempts in problems.values()), default=0)
    if not k:
        return {}
    made = {f"avg@{k}": {name: sum(each.score for each in of) / len(of) for name, of in problems.items()}}
    if k > 1 and of_right and _is_right_or_wrong(problems):
        made[f"pass@{k}"] = {name: pass_at_k(len(of), _right(of), k) for name, of in problems.items()}
        if all(each.answer for of in problems.values() for each in of):
            made[f"maj@{k}"] = {name: _score_of_majority(of[:k]) for name, of in problems.items()}
    return made


def _is_right_or_wrong(problems: Mapping[str, Sequence[Attempt]]) -> bool:
    return all(each.score in (0.0, 1.0) for attempts in problems.values() for each in attempts)


def _right(attempts: Sequence[Attempt]) -> int:
    return sum(each.score >= _RIGHT for each in attempts)


def _score_of_majority(attempts: Sequence[Attempt]) -> float:
    answer, _ = Counter(each.answer for each in attempts).most_common(1)[0]
    return next(each.score for each in attempts if each.answer == answer)


def _short_names(models: Iterable[str]) -> dict[str, str]:
    """Names of models for a column of a table: the end of a path where no other has the same."""
    names = {
        model: f"…/{model.rpartition('/')[2]}" if model.startswith(("tinker://", "/")) else model for model in models
    }
    count = Counter(names.values())
    return {model: name if count[name] == 1 else model for model, name in names.items()}


def print_table(console: Console, rows: Sequence[Estimate]) -> None:
    """Print the estimates; those of later models with their difference from the first."""
    compared = any(row.against_first for row in rows)
    table = Table(box=box.SIMPLE_HEAD)
    for name in (
        "benchmark",
        "measure",
        "model",
        "score (95 %)",
        "problems",
        *(("difference", "p") if compared else ()),
    ):
        table.add_column(name, overflow="fold", min_width=len(name))
    names = _short_names([row.model for row in rows])
    for row in sorted(rows, key=lambda row: (row.benchmark, row.measure)):
        cells = [row.benchmark, row.measure, names[row.model], f"{row.mean:.4g} ({row.low:.3g} to {row.high:.3g})"]
        cells.append(str(row.problems))
        if compared and (pair := row.against_first) is not None:
            cells += [f"{pair.difference:+.3g} ({pair.low:+.2g} to {pair.high:+.2g})", f"{pair.p_value:.2g}"]
        table.add_row(*cells)
    console.print(table)
