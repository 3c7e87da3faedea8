"""report.html: diagnosis, charts, sample rollouts and settings of a run, made from the files in the run folder.

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
from tinsmith.rl.diagnosis import diagnose
from tinsmith.rl.record import timeline
from tinsmith.rl.record.layout import Kind, Layout
from tinsmith.rl.record.monitors.base import Monitor, RunInfo, roles_of
from tinsmith.rl.record.monitors.charts import Curve, smooth, svg
from tinsmith.rl.record.monitors.jsonl import read_metrics, read_rollouts
from tinsmith.rl.types import Group
from tinsmith.settings import Settings

_SHOWN = 12
"""Number of held-out tasks that are shown with their first and last replies."""
_STEPS = 4
"""Number of steps of which a group is shown."""

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
        settings=_settings(info.settings),
        refresh=round(refresh),
        diagnosis=diagnosis,
        cards=_cards(info, rows, diagnosis.updates),
        charts=[chart for chart in _charts(rows) if chart["svg"]],
        comparison=_comparison(layout),
        timeline=timeline.svg(timeline.read(info.folder)),
        answers=_answers(layout),
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


def _cards(info: RunInfo, rows: Sequence[Row], updates: int | None) -> list[dict[str, str]]:
    """The headline numbers: held-out tasks, by what is measured; reward; steps; time."""
    cards = []
    verdicts = _says_what_is_right(rows)
    measure, baseline = ("pass@1", "pass@1") if verdicts else ("reward/mean", "reward")
    if held_out := _points(rows, f"eval/{measure}"):
        constant, tasks = _points(rows, f"eval/constant_{baseline}"), _points(rows, "eval/tasks")
        note = f"best constant answer {constant[-1][1]:.3f}" if constant else counted(tasks[-1][1], "task")
        name = "held-out tasks right" if verdicts else "held-out reward"
        cards.append({"name": name, "value": _span(held_out, 3), "note": note})
    if reward := _points(rows, "reward/mean"):
        constant = _points(rows, "eval/constant_reward")
        note = f"best constant answer {constant[-1][1]:.3f}" if constant else "mean of a step, first → last"
        cards.append({"name": "reward", "value": _span(reward, 3), "note": note})
    elif loss := _points(rows, "optim/expert_nll"):
        cards.append({"name": "nats per token of demonstrations", "value": _span(loss, 3), "note": "lower is better"})
    done = int(rows[-1]["step"]) if rows else 0
    note = _state(done, info.steps) + ("" if updates is None else f", {counted(updates, 'update')}")
    cards.append({"name": "steps", "value": f"{done} / {info.steps}", "note": note})
    seconds = sum(row.get("time/step", 0.0) + row.get("time/eval", 0.0) for row in rows)
    tokens = sum(row.get("tokens/sampled", 0.0) for row in rows)
    cards.append({"name": "time", "value": _duration(seconds), "note": f"{tokens:,.0f} tokens sampled"})
    return cards


def _charts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The charts of a run, all over the same steps; those without points have no svg."""
    drawn = _Charts(rows)
    reward, passed = _points(rows, "reward/mean"), sorted({name for row in rows for name in row if "/pass@" in name})
    held_out = [
        Curve(name=name.removeprefix("eval/"), points=_points(rows, name), color=color, dots=True)
        for color, name in enumerate([name for name in passed if name.startswith("eval/pass@")][:4], 1)
    ]
    verdicts = _says_what_is_right(rows)
    result = _points(rows, "eval/reward/mean")
    return [
        drawn.chart(
            "Reward",
            [Curve(name="each step", points=reward, faint=True), Curve(name="mean", points=smooth(reward))],
            (0, 1),
        ),
        drawn.compared("Parts of the reward", _parts(rows)),
        drawn.by_role("Reward by role", "reward"),
        drawn.chart("Held-out accuracy", [*held_out, *drawn.level("eval/constant_pass@1")], (0, 1))
        if verdicts
        else drawn.chart(
            "Held-out reward",
            [Curve(name="reward", points=result, dots=True), *drawn.level("eval/constant_reward")],
            (0, 1),
        ),
        drawn.by_role("Held-out reward by role", "eval/reward", dots=True),
        drawn.by_name("Reward by environment", r"env/([^/]+)/reward/mean"),
        drawn.by_name("Held-out reward by source", r"eval/([^/]+)/reward/mean", dots=True),
        drawn.by_name("Skill above trivial answers (1: perfect)", r"env/(.+)/skill"),
        drawn.by_name("Held-out skill above trivial answers", r"eval/(.+)/skill", dots=True),
        drawn.smoothed("Negative log-likelihood of demonstrations", "optim/expert_nll"),
        drawn.smoothed("Groups without a signal (share)", "groups/constant", floor=0.0, ceiling=1.0),
        drawn.smoothed("Entropy (estimate, nats per token)", "policy/entropy", floor=0.0),
        drawn.smoothed("Tokens of a reply (mean)", "tokens/reply", floor=0.0),
        drawn.smoothed("Replies cut off at max_tokens (share)", "rollouts/cut", floor=0.0, ceiling=1.0),
        drawn.smoothed("Gradient norm before clipping", "optim/grad_norm", floor=0.0),
        drawn.smoothed("Learning rate", "optim/lr", floor=0.0),
        drawn.smoothed("KL sampler to trainer (v2)", "optim/kl_sample_train_v2", floor=0.0),
        drawn.smoothed("Variance of the returns that the critic explains", "critic/explained_variance", ceiling=1.0),
        drawn.smoothed("Loss (sum)", "optim/loss"),
        drawn.smoothed("Overlap: share of the trainer's work with sampling", "time/overlap", floor=0.0, ceiling=1.0),
        drawn.smoothed("Tokens sampled per second", "speed/sampled_tokens_per_second", floor=0.0),
        drawn.smoothed("Tokens trained on per second", "speed/trained_tokens_per_second", floor=0.0),
    ]


class _Charts:
    """Draws charts over the steps of a run."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._span = (0.0, max(1.0, float(rows[-1]["step"]))) if rows else (0.0, 1.0)

    def chart(self, title: str, curves: Sequence[Curve], limits: tuple[float | None, float | None]) -> dict[str, Any]:
        """A chart of curves; `limits` are always on its y axis."""
        legend = [curve for curve in curves if curve.points and not curve.faint]
        return {
            "title": title,
            "svg": svg(curves, floor=limits[0], ceiling=limits[1], span=self._span),
            "legend": legend if len(legend) > 1 else [],
        }

    def level(self, name: str) -> list[Curve]:
        """A dashed line over all steps at the value of a metric that is measured once."""
        values = _points(self._rows, name)
        points = tuple((at, values[-1][1]) for at in self._span) if values else ()
        return [Curve(name="best constant answer", points=points, color=4, dashed=True)]

    def smoothed(
        self, title: str, name: str, floor: float | None = None, ceiling: float | None = None
    ) -> dict[str, Any]:
        """Each value of a metric, and their moving average."""
        points = _points(self._rows, name)
        curves = [Curve(name="each step", points=points, faint=True), Curve(name="mean", points=smooth(points))]
        return self.chart(title, curves, (floor, ceiling))

    def compared(
        self, title: str, points: Mapping[str, tuple[tuple[float, float], ...]], *, dots: bool = False
    ) -> dict[str, Any]:
        """A curve for each name."""
        curves = [
            Curve(name=name, points=each if dots else smooth(each), color=number % 4 + 1, dots=dots)
            for number, (name, each) in enumerate(points.items())
        ]
        return self.chart(title, curves, (0, 1))

    def by_role(self, title: str, prefix: str, *, dots: bool = False) -> dict[str, Any]:
        """Rewards of each role of a run of several roles; without points in other runs."""
        roles = dict.fromkeys(role for row in self._rows for role in roles_of(row, prefix))
        points = {role: _points(self._rows, f"{prefix}/{role}/mean") for role in roles}
        return self.compared(title, points, dots=dots)

    def by_name(self, title: str, pattern: str, *, dots: bool = False) -> dict[str, Any]:
        """The metrics that match `pattern`, by the name that its group matches; without points if there are none."""
        names = dict.fromkeys(name for row in self._rows for name in row)
        matches = [match for name in names if (match := re.fullmatch(pattern, name))]
        points = {each[1].replace("/workflow", ""): _points(self._rows, each[0]) for each in matches}
        return self.compared(title, points, dots=dots)


def _parts(rows: Sequence[Row]) -> dict[str, tuple[tuple[float, float], ...]]:
    """The parts of the reward, if there are several."""
    parts = dict.fromkeys(match[1] for row in rows for name in row if (match := re.fullmatch(r"reward/([^/]+)", name)))
    names = [name for name in parts if name not in ("mean", "std", "kl", "kl_coef")]
    return {name: _points(rows, f"reward/{name}") for name in names} if len(names) > 1 else {}


def _says_what_is_right(rows: Sequence[Row]) -> bool:
    """Whether rewards or workflow say what is right, or answers reach eval.threshold: else pass@1 measures nothing."""
    names = {name for row in rows for name in row if name.endswith("groups/all_right")}
    return bool(names) or any(row.get("eval/pass@1", 0.0) > 0 for row in rows)


def _comparison(layout: Layout) -> list[dict[str, Any]]:
    """The rows of comparison.json, which a run writes at its end."""
    file = layout.comparison
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def _answers(layout: Layout) -> dict[str, Any] | None:
    """Replies of the first and the last evaluation to the first held-out tasks; None without an evaluation."""
    steps = layout.steps_with_rollouts("eval")
    if not steps:
        return None
    before, after = (_first_by_task(layout.rollouts("eval", step)) for step in (steps[0], steps[-1]))
    pairs = [(rollout, after[task]) for task, rollout in before.items() if task in after][:_SHOWN]
    return {"pairs": pairs, "first": steps[0], "last": steps[-1]}


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
            examples.append({"step": step, "group": sorted(varied, key=lambda rollout: -rollout["reward"])})
    return examples


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
