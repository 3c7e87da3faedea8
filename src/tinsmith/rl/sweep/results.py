"""The outcome of a sweep: settings, best first, each with its mean over seeds; as a table, as JSON, as a page.

A run counts by the last value of the metric, or with `checkpoint.keep: best` by the best one. A setting that was
ended early is below those that went further, whatever its value: the later ones had more steps to get there.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from rich import box
from rich.console import Console
from rich.table import Table

from tinsmith.atomic import atomic_write
from tinsmith.rl.record.monitors.charts import Curve, svg
from tinsmith.rl.sweep.combinations import is_seed, short_names
from tinsmith.rl.sweep.folder import Status, SweepFolder
from tinsmith.rl.sweep.halving import mean, ranked
from tinsmith.rl.sweep.members import Member

_COLORS = 4
"""Settings with a color of their own in the chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The outcome of a run.

    Example: RunResult(name="rank=8,seed=0", values={"rank": "8", "seed": "0"}, status="finished", value=0.4, …)
    """

    name: str
    values: Mapping[str, str]
    status: Status
    step: int
    value: float
    """Of the metric, at the end; NaN if it was not measured."""
    folder: str
    curve: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingResult:
    """The outcome of the runs that differ only in seeds."""

    name: str
    values: Mapping[str, str]
    runs: tuple[RunResult, ...]

    @property
    def counted(self) -> list[RunResult]:
        """The runs that count: those that did not fail and have a value."""
        return [run for run in self.runs if run.status != "failed" and not math.isnan(run.value)]

    @property
    def mean(self) -> float:
        """Mean of the metric over the runs that count."""
        return mean([run.value for run in self.counted])

    @property
    def deviation(self) -> float:
        """Standard deviation over them, with n - 1; NaN for fewer than two."""
        values = [run.value for run in self.counted]
        return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan

    @property
    def step(self) -> int:
        """The step that all runs that did not fail have reached."""
        return min((run.step for run in self.counted), default=0)

    @property
    def state(self) -> str:
        """How its runs stand, in words."""
        words = list(dict.fromkeys(run.status for run in self.runs))
        counts = {word: sum(run.status == word for run in self.runs) for word in words}
        shown = {"ended": "ended early", "waiting": "not finished", "running": "not finished"}
        if len(words) == 1:
            return shown.get(words[0], words[0])
        return ", ".join(f"{counts[word]} {shown.get(word, word)}" for word in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a sweep."""

    metric: str
    lower: bool
    settings: tuple[SettingResult, ...]
    """Best first."""

    @property
    def best(self) -> str:
        """Name of the best run of the best setting; empty if no run has a value."""
        runs = self.settings[0].counted if self.settings else []
        return next(iter(ranked({run.name: run.value for run in runs}, lower=self.lower)), "")

    def as_json(self) -> dict[str, Any]:
        """The outcome as JSON has it: NaN is null."""
        rows = [
            {
                "setting": each.name,
                "values": dict(each.values),
                "mean": _number(each.mean),
                "deviation": _number(each.deviation),
                "step": each.step,
                "state": each.state,
                "runs": [{**asdict(run), "value": _number(run.value), "curve": _curve(run)} for run in each.runs],
            }
            for each in self.settings
        ]
        direction = "lower" if self.lower else "higher"
        return {"metric": self.metric, "better": direction, "best": self.best or None, "settings": rows}


def outcome(members: Sequence[Member], statuses: Mapping[str, Status], metric: str, *, lower: bool = False) -> Outcome:
    """The outcome of runs that stand as `statuses` says, read from their folders."""
    by_setting: dict[str, list[Member]] = {}
    for member in members:
        by_setting.setdefault(member.combination.setting, []).append(member)
    results = {name: _setting(name, of_setting, statuses, metric) for name, of_setting in by_setting.items()}
    order = ranked({name: result.mean for name, result in results.items()}, lower=lower)
    order.sort(key=lambda name: _rank(results[name]))
    return Outcome(metric=metric, lower=lower, settings=tuple(results[name] for name in order))


def _rank(result: SettingResult) -> tuple[bool, float]:
    """Orders settings before their values do: those with none are last, those that were ended early by how far they
    went."""
    ended = any(run.status == "ended" for run in result.runs)
    return not result.counted, -result.step if ended else -math.inf


def _setting(name: str, members: Sequence[Member], statuses: Mapping[str, Status], metric: str) -> SettingResult:
    runs = tuple(_run(member, statuses[member.name], metric) for member in members)
    values = {key: text for key, text in members[0].combination.values.items() if not is_seed(key)}
    return SettingResult(name=name, values=values, runs=runs)


def _run(member: Member, status: Status, metric: str) -> RunResult:
    curve, settings = member.curve(metric), member.config.checkpoint
    counted = [value for _, value in curve[-1:]]
    if settings.keep == "best" and settings.metric == metric:  # the result is the best checkpoint
        values = {str(step): value for step, value in curve if step}
        counted = [values[name] for name in ranked(values, lower=settings.better == "lower")[:1]] or counted
    return RunResult(
        name=member.name,
        values=dict(member.combination.values),
        status=status,
        step=member.step,
        value=counted[0] if counted else math.nan,
        folder=str(member.path),
        curve=tuple(curve),
    )


def print_table(console: Console, result: Outcome) -> None:
    """Print the settings, best first."""
    keys = list(result.settings[0].values) if result.settings else []
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", *(short_names(keys).values() or ["setting"]), result.metric, "runs", "steps", ""):
        table.add_column(name, overflow="fold", no_wrap=name == result.metric)
    for number, each in enumerate(result.settings, 1):
        values = [each.values[key] for key in keys] or [each.name]
        table.add_row(str(number), *values, shown(each), str(len(each.counted)), str(each.step), each.state)
    console.print(table)


def shown(each: SettingResult) -> str:
    """Mean and deviation as text."""
    if math.isnan(each.mean):
        return "-"
    return f"{each.mean:.4g}" if math.isnan(each.deviation) else f"{each.mean:.4g} ± {each.deviation:.2g}"


def write(folder: SweepFolder, name: str, result: Outcome) -> None:
    """Write results.json and sweep.html."""
    atomic_write(folder.results, json.dumps(result.as_json(), indent=2, allow_nan=False).encode())
    text = files("tinsmith.rl.sweep").joinpath("page.html.j2").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
    curves = _curves(result)
    page = template.render(
        name=name,
        outcome=result,
        keys=short_names(result.settings[0].values if result.settings else ()),
        shown=shown,
        svg=svg(curves),
        legend=[curve for curve in curves if not curve.faint],
        links={run.name: _link(folder, run) for each in result.settings for run in each.runs},
    )
    atomic_write(folder.page, page.encode())


def _link(folder: SweepFolder, run: RunResult) -> str:
    path = Path(run.folder).absolute()
    inside = path.is_relative_to(folder.path)
    return f"{path.relative_to(folder.path) if inside else path}/report.html"


def _curves(result: Outcome) -> list[Curve]:
    """The mean over the seeds of each setting by step; the best have colors."""
    curves = []
    for number, each in enumerate(result.settings):
        values: dict[int, list[float]] = {}
        for run in each.runs:
            for step, value in run.curve:
                values.setdefault(step, []).append(value)
        whole = max(map(len, values.values()), default=0)  # a step that some seeds lack would be a mean of others
        points = tuple((float(step), mean(of)) for step, of in sorted(values.items()) if len(of) == whole)
        faint = number >= _COLORS
        curves.append(Curve(name=each.name, points=points, color=_COLORS if faint else number + 1, faint=faint))
    return curves


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _curve(run: RunResult) -> list[list[float | None]]:
    return [[step, _number(value)] for step, value in run.curve]
