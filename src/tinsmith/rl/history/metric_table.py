"""The metrics of a run as a table: a row for each step, a column for each metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class MetricTable:
    """Rows of metrics.jsonl, in order of their steps; training and evaluation of a step are one row.

    Example: MetricTable(read_metrics(Path("runs/demo"))).points("reward/mean") == [(1, 0.1), (2, 0.2)]
    """

    rows: Sequence[Mapping[str, float]]

    @cached_property
    def names(self) -> list[str]:
        """The names of the metrics, each once, in the order in which they first appear."""
        return [name for name in dict.fromkeys(name for row in self.rows for name in row) if name != "step"]

    @property
    def steps(self) -> list[int]:
        """The steps of the rows."""
        return [int(row["step"]) for row in self.rows]

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric in the rows that have it; a value that is not finite is NaN."""
        return [(int(row["step"]), row[name]) for row in self.rows if name in row]

    def column(self, name: str) -> list[float | None]:
        """A value for each row; None where it is missing or not finite."""
        values = (row.get(name, math.nan) for row in self.rows)
        return [value if math.isfinite(value) else None for value in values]

    def columns(self) -> dict[str, list[Any]]:
        """All columns by name, the steps among them, as JSON holds them."""
        return {"step": self.steps, **{name: self.column(name) for name in self.names}}

    def last(self, name: str) -> float | None:
        """The newest finite value of a metric; None if there is none."""
        values = (value for _, value in reversed(self.points(name)) if math.isfinite(value))
        return next(values, None)

    def evaluations(self) -> list[dict[str, float]]:
        """The metrics of each evaluation, with its step."""
        rows = ({name: row[name] for name in row if name == "step" or name.startswith("eval/")} for row in self.rows)
        return [row for row in rows if len(row) > 1]
