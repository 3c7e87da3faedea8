"""Curves of one or several runs, as the page draws them. Pure: from settings and metric tables to JSON values.

Runs whose settings differ in nothing but their seeds and names are one line: the mean over the runs at each step, with
a band from the smallest to the largest value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tinsmith.rl.history import MetricTable
from tinsmith.rl.history.chart_specs import ChartSpec, chart_specs
from tinsmith.settings import flatten

_UNCOMPARED = re.compile(
    r"(name|description|folder|resume|resume_from|log_level|time_limit|grace_period|concurrency|seed|model\.seed"
    r"|model\.wait|model\.base_url|model\.api_key_env|tasks\.(train\.)?seed|tasks\.split_seed|sampling\.seed)$"
    r"|(monitors|service|checkpoint)\b.*"
)
"""Keys that may differ between runs of one setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedRun:
    """A run, as far as curves need it."""

    label: str
    settings: Mapping[str, Any]
    metrics: MetricTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A metric over steps: of a run, or of several that differ in their seeds.

    Example: Line(label="grpo (3 seeds)", values={1: 0.2, 2: 0.4}, low={1: 0.1, 2: 0.3}, high={1: 0.3, 2: 0.5})
    """

    label: str
    values: Mapping[int, float | None]
    """By step; None for a value that is not finite."""
    color: int = 0
    """Number of its color: by run, or by metric if there is one run."""
    dashes: int = 0
    """Number of its pattern of dashes, by metric if there are several runs."""
    is_constant: bool = False
    """Whether it is the score of a constant answer: one number, valid for all steps."""
    low: Mapping[int, float] = field(default_factory=dict)
    high: Mapping[int, float] = field(default_factory=dict)
    """Smallest and largest value, at steps that several runs have."""


def charts(runs: Sequence[PlottedRun], extra: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All charts of some runs: those of `chart_specs`, and one for each metric in `extra`."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics.names))
    by_label = {run.label: run for run in runs}
    labels = seed_groups([(run.label, run.settings) for run in runs])
    groups = {name: [by_label[label] for label in each] for name, each in labels.items()}
    own = [ChartSpec(title=name, pattern=re.escape(name)) for name in extra]
    usual = chart_specs(row for run in runs for row in run.metrics.rows)
    return [
        {"section": section, **chart}
        for section, specs in {**usual, "Chosen metrics": own}.items()
        for spec in specs
        if (chart := _chart(spec, groups, names)) is not None
    ]


def seed_groups(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, list[str]]:
    """Label of a line -> labels of its runs, from (label, settings) of each: those of one line differ in nothing but
    seeds and names."""
    by_settings: dict[str, list[str]] = {}
    for label, settings in runs:
        by_settings.setdefault(repr(compared_settings(settings)) if settings else label, []).append(label)
    groups = {}
    for labels in by_settings.values():
        name = labels[0] if len(labels) == 1 else f"{common_label(labels)} ({len(labels)} seeds)"
        groups[name if name not in groups else f"{name} [{len(groups) + 1}]"] = labels
    return groups


def compared_settings(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The settings, by dotted key, in which runs of one setting are equal; empty for a run without settings."""
    return sorted((key, value) for key, value in flatten(settings).items() if not _UNCOMPARED.match(key))


def common_label(labels: Sequence[str]) -> str:
    """The label that several seeds share: their common begin, without what separates it from the seed."""
    prefix = labels[0]
    for label in labels[1:]:
        while not label.startswith(prefix):
            prefix = prefix[:-1]
    return re.sub(r"[-_/ .]*(seed)?[-_/ .=]*$", "", prefix) or labels[0]


def _chart(spec: ChartSpec, groups: Mapping[str, Sequence[PlottedRun]], names: Sequence[str]) -> dict[str, Any] | None:
    matches = spec.matches(names)
    several = len(groups) > 1
    lines = [
        line
        for run, (label, group) in enumerate(groups.items())
        for number, (name, metric) in enumerate(matches)
        for line in _lines(
            _curve_label(label, metric, len(groups), len(matches)),
            (run, number) if several else (number, 0),
            group,
            name,
        )
    ]
    if not lines:
        return None
    steps = sorted({step for line in lines for step in line.values})
    lines = [_level(line, steps) if line.is_constant else line for line in lines]
    return {
        "title": spec.title,
        "limits": spec.limits,
        "points": spec.points,
        "steps": steps,
        "lines": [_line_json(line, steps) for line in lines],
    }


def _curve_label(run: str, metric: str, runs: int, metrics: int) -> str:
    if runs == 1:
        return metric
    return run if metrics == 1 else f"{run}: {metric}"


def _lines(label: str, look: tuple[int, int], runs: Sequence[PlottedRun], name: str) -> Iterator[Line]:
    """The line of a metric, if a run has it. `look`: its color and dashes."""
    by_step: dict[int, list[float | None]] = {}
    for run in runs:
        for step, value in run.metrics.points(name):
            by_step.setdefault(step, []).append(value if math.isfinite(value) else None)
    if not by_step:
        return
    finite = {step: [value for value in values if value is not None] for step, values in sorted(by_step.items())}
    several = {step: values for step, values in finite.items() if len(values) > 1}
    yield Line(
        label=label,
        color=look[0],
        dashes=look[1],
        is_constant="/constant_" in name,
        values={step: sum(values) / len(values) if values else None for step, values in finite.items()},
        low={step: min(values) for step, values in several.items()},
        high={step: max(values) for step, values in several.items()},
    )


def _level(line: Line, steps: Sequence[int]) -> Line:
    """The newest value at all steps."""
    return replace(line, values=dict.fromkeys(steps, list(line.values.values())[-1]), low={}, high={})


def _line_json(line: Line, steps: Sequence[int]) -> dict[str, Any]:
    values = [line.values.get(step) for step in steps]
    look = {"color": line.color, "dashes": line.dashes, "is_constant": line.is_constant}
    record: dict[str, Any] = {"label": line.label, "values": values, **look}
    if line.low:
        record |= {"low": [line.low.get(step) for step in steps], "high": [line.high.get(step) for step in steps]}
    return record
