"""report.html: diagnosis, charts, sample rollouts and settings of a run, made from the files in the run folder.

The page is self-contained: it loads no script, font or picture. It is rewritten regularly during the run, and at its
end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import jinja2
from markupsafe import Markup
from pydantic import Field
from typing_extensions import override

from tinsmith.atomic import atomic_write
from tinsmith.plurals import counted
from tinsmith.rl.diagnosis import diagnose
from tinsmith.rl.history.chart_specs import ChartSpec, chart_specs
from tinsmith.rl.history.metric_table import MetricTable
from tinsmith.rl.history.rollout_html import STYLE, rollout_html
from tinsmith.rl.history.run import RunHistory
from tinsmith.rl.history.status import end_of_log
from tinsmith.rl.record import timeline
from tinsmith.rl.record.layout import Kind, Layout
from tinsmith.rl.record.metrics import measures_right
from tinsmith.rl.record.monitors.base import Monitor, RunInfo
from tinsmith.rl.record.monitors.charts import Curve, smooth, svg
from tinsmith.rl.record.monitors.jsonl import read_metrics, read_rollouts
from tinsmith.rl.types import Group
from tinsmith.settings import Settings, to_yaml

_SHOWN = 12
"""Number of held-out tasks that are shown with their first and last replies."""
_STEPS, _REPLIES = 4, 16
"""Number of steps of which a group is shown, and most rollouts of it."""
_CHARACTERS = 20_000
"""Characters of a task or a reply in the page."""

Row = Mapping[str, float]


class ReportConfig(Settings):
    """report.html in the run folder: diagnosis, charts, sample replies and settings."""

    type: Literal["report"] = "report"
    seconds: float = Field(default=15.0, gt=0)
    """Minimum time between updates of the page, in seconds."""


class ReportMonitor(Monitor):
    """Rewrites the page regularly, and at the end of the run."""

    def __init__(self, config: ReportConfig, info: RunInfo) -> None:
        self._seconds, self._info = config.seconds, info
        self._written = 0.0

    @override
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        if time.monotonic() - self._written > self._seconds:
            write(self._info, refresh=self._seconds)
            self._written = time.monotonic()

    @override
    def rollouts(self, step: int, kind: Kind, groups: Sequence[Group]) -> None:
        """The report reads rollouts from the files of JsonlMonitor."""

    @override
    def close(self) -> None:
        write(self._info)


def write(info: RunInfo, refresh: float = 0.0) -> Path:
    """Write report.html from metrics.jsonl and rollouts/, and return its path.

    With `refresh`, a browser reloads the page every so many seconds.
    """
    rows, layout = read_metrics(info.folder), Layout(info.folder)
    diagnosis = diagnose(info.settings, rows)
    page = _template().render(
        info=info,
        settings=to_yaml(info.settings),
        refresh=round(refresh),
        diagnosis=diagnosis,
        cards=_cards(info, rows, "running" if refresh else _ending(layout), diagnosis.updates),
        charts=[chart for chart in _charts(rows) if chart["svg"]],
        comparison=RunHistory(layout.path).comparison,
        timeline=timeline.svg(timeline.read(info.folder)),
        answers=_answers(layout),
        style=STYLE,
        example_groups=_example_groups(layout),
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
    )
    atomic_write(layout.report, page.encode())
    return layout.report


def _template() -> jinja2.Template:
    text = files("tinsmith.rl.record.monitors").joinpath("report.html.j2").read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)


def _points(rows: Sequence[Row], name: str) -> tuple[tuple[float, float], ...]:
    return tuple((row["step"], row[name]) for row in rows if name in row)


def _cards(info: RunInfo, rows: Sequence[Row], condition: str, updates: int | None) -> list[dict[str, str]]:
    """The headline numbers: held-out tasks, by what is measured; reward; steps, with the run's condition; time."""
    cards = []
    right = measures_right(rows)
    measure, baseline = ("pass@1", "pass@1") if right else ("reward/mean", "reward")
    if held_out := _points(rows, f"eval/{measure}"):
        constant, tasks = _points(rows, f"eval/constant_{baseline}"), _points(rows, "eval/tasks")
        note = f"best constant answer {constant[-1][1]:.3f}" if constant else counted(tasks[-1][1], "task")
        name = "held-out tasks right" if right else "held-out reward"
        cards.append({"name": name, "value": _span(held_out, 3), "note": note})
    elif info.not_evaluated:
        cards.append({"name": "held-out tasks", "value": "not evaluated", "note": info.not_evaluated})
    if reward := _points(rows, "reward/mean"):
        constant = _points(rows, "eval/constant_reward")
        note = f"best constant answer {constant[-1][1]:.3f}" if constant else "mean of a step, first → last"
        cards.append({"name": "reward", "value": _span(reward, 3), "note": note})
    elif loss := _points(rows, "optim/expert_nll"):
        cards.append({"name": "nats per token of demonstrations", "value": _span(loss, 3), "note": "lower is better"})
    done = int(rows[-1]["step"]) if rows else 0
    note = condition + ("" if updates is None else f", {counted(updates, 'update')}")
    cards.append({"name": "steps", "value": f"{done} / {info.steps}", "note": note})
    seconds = sum(row.get("time/step", 0.0) + row.get("time/eval", 0.0) for row in rows)
    tokens = sum(row.get("tokens/sampled", 0.0) for row in rows)
    cards.append({"name": "time", "value": _duration(seconds), "note": f"{tokens:,.0f} tokens sampled"})
    return cards


def _charts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The charts of a run, all over the same steps; those without points have no svg."""
    table = MetricTable(rows)
    span = (0.0, max(1.0, float(rows[-1]["step"]))) if rows else (0.0, 1.0)
    return [_chart(table, spec, span) for section in chart_specs(rows).values() for spec in section]


def _chart(table: MetricTable, spec: ChartSpec, span: tuple[float, float]) -> dict[str, Any]:
    """A chart; a single curve is a moving average before the values of each step."""
    matches = spec.matches(table.names)
    curves = [_curve(table, spec, name, label, number, span) for number, (name, label) in enumerate(matches)]
    if len(matches) == 1 and not spec.points:
        points = tuple(table.points(matches[0][0]))
        curves = [Curve(name="each step", points=points, faint=True), Curve(name="mean", points=smooth(points))]
    legend = [curve for curve in curves if curve.points and not curve.faint]
    return {
        "title": spec.title,
        "svg": svg(curves, floor=spec.limits[0], ceiling=spec.limits[1], span=span),
        "legend": legend if len(legend) > 1 else [],
    }


def _curve(table: MetricTable, spec: ChartSpec, name: str, label: str, number: int, span: tuple[float, float]) -> Curve:
    """The curve of a metric; the score of a constant answer, which is measured once, is a line over all steps."""
    points = tuple(table.points(name))
    if "/constant_" in name:
        level = tuple((at, points[-1][1]) for at in span)
        return Curve(name="best constant answer", points=level, color=4, dashed=True)
    return Curve(name=label, points=points if spec.points else smooth(points), color=number % 4 + 1, dots=spec.points)


def _answers(layout: Layout) -> dict[str, Any] | None:
    """Replies of the first and the last evaluation to the first held-out tasks; None without an evaluation."""
    steps = layout.steps_with_rollouts("eval")
    if not steps:
        return None
    before, after = (_first_by_task(layout.rollouts("eval", step)) for step in (steps[0], steps[-1]))
    pairs = [[rollout, after[task]] for task, rollout in before.items() if task in after][:_SHOWN]
    shown = pairs if len(steps) > 1 else [pair[:1] for pair in pairs]
    rows = [{"task": _task(pair[0]), "replies": [_reply(each) for each in pair]} for pair in shown]
    return {"rows": rows, "first": steps[0], "last": steps[-1]}


def _example_groups(layout: Layout) -> list[dict[str, Any]]:
    """Groups of up to _STEPS steps from the first to the last, newest first: of each step, the group with the most
    different rewards, best rollout first."""
    steps = layout.steps_with_rollouts("train")
    count = min(_STEPS, len(steps))
    shown = dict.fromkeys(steps[round(at * (len(steps) - 1) / max(1, count - 1))] for at in range(count))
    examples: list[dict[str, Any]] = []
    for step in reversed(list(shown)):
        groups: dict[str, list[dict[str, Any]]] = {}
        for rollout in read_rollouts(layout.rollouts("train", step)):
            groups.setdefault(rollout["task"], []).append(rollout)
        if groups:
            varied = max(groups.values(), key=lambda group: len({rollout["reward"] for rollout in group}))
            best_first = sorted(varied, key=lambda rollout: -rollout["reward"])
            replies = [_reply(rollout) for rollout in best_first[:_REPLIES]]
            left_out = len(varied) - len(replies)
            examples.append({"step": step, "task": _task(varied[0]), "replies": replies, "left_out": left_out})
    return examples


def _task(record: Mapping[str, Any]) -> Markup:
    """The messages and the right answer of a task, without the reply."""
    shown = ("messages", "answer")
    return rollout_html({name: record.get(name) for name in shown}, characters=_CHARACTERS, with_head=False)


def _reply(record: Mapping[str, Any]) -> Markup:
    return rollout_html(record, characters=_CHARACTERS, with_task=False)


def _first_by_task(file: Path) -> dict[str, dict[str, Any]]:
    first: dict[str, dict[str, Any]] = {}
    for rollout in read_rollouts(file):
        first.setdefault(rollout["task"], rollout)
    return first


def _span(points: Sequence[tuple[float, float]], digits: int) -> str:
    first, last = points[0][1], points[-1][1]
    return f"{first:.{digits}f} → {last:.{digits}f}" if len(points) > 1 else f"{first:.{digits}f}"


def _ending(layout: Layout) -> str:
    """How the run ended, by its log, which has an error only after its monitors are closed."""
    condition, reason = end_of_log(layout.log)
    return f"stopped by {reason}" if condition == "stopped" else condition or "not finished"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
