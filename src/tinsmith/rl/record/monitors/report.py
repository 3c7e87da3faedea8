"""report.html: charts, sample rollouts and settings of a run, made from the files in the run folder.

The page is self-contained: it loads no script, font or picture. It is rewritten regularly during the run, and at its
end.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import jinja2
from pydantic import Field
from typing_extensions import override

from tinsmith.atomic import atomic_write
from tinsmith.plurals import counted
from tinsmith.rl.record import timeline
from tinsmith.rl.record.layout import Kind, Layout
from tinsmith.rl.record.monitors.base import Monitor, RunInfo, roles_of
from tinsmith.rl.record.monitors.charts import Curve, smooth, svg
from tinsmith.rl.record.monitors.jsonl import read_metrics, read_rollouts
from tinsmith.rl.types import Group
from tinsmith.settings import Settings

_SHOWN = 12
"""Number of held-out tasks that are shown with their first and last answers."""

Row = Mapping[str, float]


class ReportConfig(Settings):
    """report.html in the run folder: charts, sample answers and settings."""

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
    page = _template().render(
        info=info,
        settings=_settings(info.settings),
        refresh=round(refresh),
        cards=_cards(info, rows),
        charts=[chart for chart in _charts(rows) if chart["svg"]],
        comparison=_comparison(layout),
        timeline=timeline.svg(timeline.read(info.folder)),
        answers=_answers(layout),
        example_group=_example_group(layout),
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
    )
    atomic_write(layout.report, page.encode())
    return layout.report


def _template() -> jinja2.Template:
    text = files("tinsmith.rl.record.monitors").joinpath("report.html.j2").read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)


def _points(rows: Sequence[Row], name: str) -> tuple[tuple[float, float], ...]:
    return tuple((row["step"], row[name]) for row in rows if name in row)


def _cards(info: RunInfo, rows: Sequence[Row]) -> list[dict[str, str]]:
    """The headline numbers: held-out accuracy, reward, steps and time."""
    cards = []
    if held_out := _points(rows, "eval/pass@1"):
        constant = _points(rows, "eval/constant_pass@1")
        note = (
            f"best constant answer {constant[-1][1]:.3f}"
            if constant
            else f"{counted(rows[0].get('eval/tasks', 0), 'task')}"
        )
        cards.append({"name": "held-out pass@1", "value": _span(held_out, 3), "note": note})
    if reward := _points(rows, "reward/mean"):
        constant = _points(rows, "eval/constant_reward")
        note = f"best constant answer {constant[-1][1]:.3f}" if constant else "mean over the step's rollouts"
        cards.append({"name": "reward", "value": _span(reward, 3), "note": note})
    done = int(rows[-1]["step"]) if rows else 0
    cards.append({"name": "steps", "value": f"{done} / {info.steps}", "note": _state(done, info.steps)})
    seconds = sum(row.get("time/step", 0.0) + row.get("time/eval", 0.0) for row in rows)
    tokens = sum(row.get("tokens/sampled", 0.0) for row in rows)
    cards.append({"name": "time", "value": _duration(seconds), "note": f"{tokens:,.0f} tokens sampled"})
    return cards


def _charts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    reward, passed = _points(rows, "reward/mean"), sorted({name for row in rows for name in row if "/pass@" in name})
    held_out = [
        Curve(name=name.removeprefix("eval/"), points=_points(rows, name), color=color, dots=True)
        for color, name in enumerate([name for name in passed if name.startswith("eval/pass@")][:4], 1)
    ]
    constant = _points(rows, "eval/constant_pass@1")
    last = float(rows[-1]["step"]) if rows else 0.0
    level = ((0.0, constant[-1][1]), (max(last, 1.0), constant[-1][1])) if constant else ()
    return [
        _chart(
            "Reward",
            [Curve(name="each step", points=reward, faint=True), Curve(name="mean", points=smooth(reward))],
            (0, 1),
        ),
        _by_role(rows, "Reward by role", "reward"),
        _chart(
            "Held-out accuracy",
            [*held_out, Curve(name="best constant answer", points=level, color=4, dashed=True)],
            (0, 1),
        ),
        _by_role(rows, "Held-out reward by role", "eval/reward", dots=True),
        _by_name(rows, "Reward by environment", r"env/([^/]+)/reward/mean"),
        _by_name(rows, "Held-out reward by source", r"eval/([^/]+)/reward/mean", dots=True),
        _by_name(rows, "Skill above trivial answers (1: perfect)", r"env/(.+)/skill"),
        _by_name(rows, "Held-out skill above trivial answers", r"eval/(.+)/skill", dots=True),
        _smoothed("Entropy (estimate, nats per token)", rows, "optim/entropy", floor=0.0),
        _smoothed("KL sampler to trainer (v2)", rows, "optim/kl_sample_train_v2", floor=0.0),
        _smoothed("Loss (sum)", rows, "optim/loss"),
        _smoothed("Gradient norm before clipping", rows, "optim/grad_norm", floor=0.0),
        _smoothed("Groups without a signal (share)", rows, "groups/constant", floor=0.0, ceiling=1.0),
        _smoothed("Tokens of an answer (mean)", rows, "tokens/reply", floor=0.0),
        _smoothed("Answers cut off at the limit (share)", rows, "rollouts/cut", floor=0.0, ceiling=1.0),
        _smoothed("Overlap: share of the trainer's work with sampling", rows, "time/overlap", floor=0.0, ceiling=1.0),
        _smoothed("Tokens sampled per second", rows, "speed/sampled_tokens_per_second", floor=0.0),
        _smoothed("Tokens trained on per second", rows, "speed/trained_tokens_per_second", floor=0.0),
    ]


def _by_role(rows: Sequence[Row], title: str, prefix: str, *, dots: bool = False) -> dict[str, Any]:
    """Rewards of each role of a run of several roles; without points in other runs."""
    roles = dict.fromkeys(role for row in rows for role in roles_of(row, prefix))
    return _compared(title, {role: _points(rows, f"{prefix}/{role}/mean") for role in roles}, dots=dots)


def _by_name(rows: Sequence[Row], title: str, pattern: str, *, dots: bool = False) -> dict[str, Any]:
    """The metrics that match `pattern`, by the name that its group matches; without points if there are none."""
    names = dict.fromkeys(name for row in rows for name in row)
    matches = [match for name in names if (match := re.fullmatch(pattern, name))]
    return _compared(title, {each[1].replace("/workflow", ""): _points(rows, each[0]) for each in matches}, dots=dots)


def _compared(title: str, points: Mapping[str, tuple[tuple[float, float], ...]], *, dots: bool) -> dict[str, Any]:
    curves = [
        Curve(name=name, points=each if dots else smooth(each), color=number % 4 + 1, dots=dots)
        for number, (name, each) in enumerate(points.items())
    ]
    return _chart(title, curves, (0, 1))


def _smoothed(
    title: str, rows: Sequence[Row], name: str, floor: float | None = None, ceiling: float | None = None
) -> dict[str, Any]:
    points = _points(rows, name)
    curves = [Curve(name="each step", points=points, faint=True), Curve(name="mean", points=smooth(points))]
    return _chart(title, curves, (floor, ceiling))


def _chart(title: str, curves: Sequence[Curve], limits: tuple[float | None, float | None]) -> dict[str, Any]:
    legend = [curve for curve in curves if curve.points and not curve.faint]
    return {
        "title": title,
        "svg": svg(curves, floor=limits[0], ceiling=limits[1]),
        "legend": legend if len(legend) > 1 else [],
    }


def _comparison(layout: Layout) -> list[dict[str, Any]]:
    """The rows of comparison.json, which a run writes at its end."""
    file = layout.comparison
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def _answers(layout: Layout) -> dict[str, Any] | None:
    """Answers of the first and the last evaluation to the first held-out tasks; None without an evaluation."""
    steps = layout.steps_with_rollouts("eval")
    if not steps:
        return None
    before, after = (_first_by_task(layout.rollouts("eval", step)) for step in (steps[0], steps[-1]))
    pairs = [(rollout, after[task]) for task, rollout in before.items() if task in after][:_SHOWN]
    return {"pairs": pairs, "first": steps[0], "last": steps[-1]}


def _example_group(layout: Layout) -> dict[str, Any] | None:
    """The group of the last step with the most different rewards, best rollout first; None without a step."""
    steps = layout.steps_with_rollouts("train")
    if not steps:
        return None
    groups: dict[str, list[dict[str, Any]]] = {}
    for rollout in read_rollouts(layout.rollouts("train", steps[-1])):
        groups.setdefault(rollout["task"], []).append(rollout)
    varied = max(groups.values(), key=lambda group: len({rollout["reward"] for rollout in group}))
    return {"step": steps[-1], "group": sorted(varied, key=lambda rollout: -rollout["reward"])}


def _first_by_task(file: Path) -> dict[str, dict[str, Any]]:
    first: dict[str, dict[str, Any]] = {}
    for rollout in read_rollouts(file):
        first.setdefault(rollout["task"], rollout)
    return first


def _settings(settings: Mapping[str, Any]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dict(settings)))


def _span(points: Sequence[tuple[float, float]], digits: int) -> str:
    first, last = points[0][1], points[-1][1]
    return f"{first:.{digits}f} → {last:.{digits}f}" if len(points) > 1 else f"{first:.{digits}f}"


def _state(done: int, steps: int) -> str:
    return "finished" if done >= steps else "running or interrupted"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
