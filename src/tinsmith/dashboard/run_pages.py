"""Pages of runs: the list, a run, several compared, and their curves as JSON."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from tinsmith.dashboard import comparison, curves
from tinsmith.dashboard.pages import Pages, at, duration, number
from tinsmith.dashboard.runs import RunEntry, Runs, RunSummary
from tinsmith.rl.history import MetricTable, RunHistory
from tinsmith.rl.record import timeline
from tinsmith.rl.record.metrics import measures_right

_ROWS = 100
"""Runs on a page of the list."""
_COMPARED = 12
"""Most runs that one page compares."""
_LOG_BYTES = 12_000


class RunPages:
    """Endpoints of the pages of runs. They read files, and run in threads."""

    def __init__(self, runs: Runs, pages: Pages) -> None:
        self._runs, self._pages = runs, pages

    @property
    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/runs", self.list_runs),
            Route("/runs/{run}", self.show_run),
            Route("/runs/{run}/verdict", self.show_verdict),
            Route("/compare", self.compare),
            Route("/curves", self.curves),
        ]

    def list_runs(self, request: Request) -> Response:
        """The list, newest first, as the query filters it."""
        words = request.query_params.get("q", "").strip()
        entries = self._runs.entries()
        if words:
            entries = [entry for entry in entries if _matches(self._runs.summary(entry), words)]
        count = max(1, math.ceil(len(entries) / _ROWS))
        page = min(max(1, _integer(request.query_params.get("page"), 1)), count)
        shown = entries[(page - 1) * _ROWS : page * _ROWS]
        return self._pages.render(
            request,
            "runs.html",
            rows=[self._runs.summary(entry) for entry in shown],
            diagnoses={entry.id: self._runs.known_diagnosis(entry) for entry in shown},
            query=words,
            total=len(entries),
            page=page,
            pages=count,
            folders=list(map(str, self._runs.folders)),
        )

    def show_verdict(self, request: Request) -> Response:
        """The diagnosis in a cell of the list."""
        if (entry := self._runs.find(request.path_params["run"])) is None:
            return Response(status_code=404)
        return self._pages.render(request, "verdict.html", diagnosis=self._runs.diagnosis(entry))

    def show_run(self, request: Request) -> Response:
        """The page of a run."""
        if (entry := self._runs.find(request.path_params["run"])) is None:
            return self._unknown(request)
        run, summary, entries = self._runs.open(entry), self._runs.summary(entry), self._runs.entries()
        metrics = run.metrics
        inside = {each.path for each in (*run.stages, *run.parts.values())}
        return self._pages.render(
            request,
            "run.html",
            entry=entry,
            status=summary.status,
            settings=summary.settings,
            summary_line=_summary_line(summary.settings),
            cards=_cards(summary, metrics),
            diagnosis=self._runs.diagnosis(entry),
            comparison=run.comparison,
            inside=[each for each in entries if each.folder in inside],
            results=run.results,
            measures=_measures(run.results),
            overlays=[each for each in entries if each.id != entry.id][:200],
            timeline=Markup(timeline.svg(run.timeline)),
            metrics=[_range(metrics, name) for name in metrics.names],
            rows=len(metrics.rows),
            chosen=request.query_params.getlist("metric"),
            settings_text=_text(run.layout.settings),
            log=_text(run.layout.log, _LOG_BYTES),
        )

    def compare(self, request: Request) -> Response:
        """Several runs beside each other."""
        entries = self._selected(request)
        if not entries:
            return RedirectResponse(f"{request.scope.get('root_path', '')}/runs", 303)
        rows = [self._runs.summary(entry) for entry in entries]
        differences = comparison.setting_differences([row.settings for row in rows])
        return self._pages.render(
            request,
            "compare.html",
            rows=rows,
            ids=[entry.id for entry in entries],
            diagnoses={entry.id: self._runs.diagnosis(entry) for entry in entries},
            differences=differences,
            comparisons=self._comparisons(entries),
            chosen=request.query_params.getlist("metric"),
        )

    def curves(self, request: Request) -> Response:
        """The curves of runs as JSON; 304 as long as none of their metrics has changed."""
        entries = self._selected(request)
        histories = [self._runs.open(entry) for entry in entries]
        marks = [(str(request.url.query), *map(_mark, (run.layout.metrics, run.layout.settings))) for run in histories]
        tag = f'"{hashlib.sha256(repr(marks).encode()).hexdigest()[:24]}"'
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        runs = [
            curves.PlottedRun(label=entry.label, settings=self._runs.settings(entry), metrics=run.metrics)
            for entry, run in zip(entries, histories, strict=True)
        ]
        return JSONResponse({"charts": curves.charts(runs, request.query_params.getlist("metric"))}, headers=headers)

    def _comparisons(self, entries: Sequence[RunEntry]) -> list[comparison.RunComparison]:
        """Each setting against the first; if all runs are seeds of one setting, each run against the first."""
        runs = {entry.label: RunHistory(entry.folder) for entry in entries}
        groups = curves.seed_groups([(entry.label, self._runs.settings(entry)) for entry in entries])
        named = [(label, [runs[each] for each in labels]) for label, labels in groups.items()]
        if len(named) == 1:
            named = [(label, [run]) for label, run in runs.items()]
        return [comparison.paired(named[0], other, self._runs.cache) for other in named[1:]]

    def _selected(self, request: Request) -> list[RunEntry]:
        ids = dict.fromkeys(request.query_params.getlist("run"))
        return [entry for each in ids if (entry := self._runs.find(each)) is not None][:_COMPARED]

    def _unknown(self, request: Request) -> Response:
        folders = ", ".join(map(str, self._runs.folders))
        return self._pages.message(
            request, "There is no such run", f"It is not in {folders} any more, or never was.", code=404
        )


def _matches(summary: RunSummary, words: str) -> bool:
    """Whether each word is in what the list shows of a run."""
    shown = (at(summary.settings, "model.name"), at(summary.settings, "algorithm.type"), summary.status.condition)
    text = " ".join(map(str, (summary.entry.label, *shown))).casefold()
    return all(word in text for word in words.casefold().split())


def _summary_line(settings: Mapping[str, Any]) -> str:
    loss = at(settings, "algorithm.loss.type")
    parts = (
        at(settings, "model.name"),
        f"LoRA rank {at(settings, 'model.rank')}" if at(settings, "model.rank") else "",
        f"{at(settings, 'groups_per_step')} tasks × {at(settings, 'group_size')} replies a step",
        f"{at(settings, 'algorithm.type')}{f' with {loss}' if loss else ''}",
        f"learning rate {at(settings, 'optimizer.learning_rate')}",
        f"seed {at(settings, 'seed')}",
    )
    return " · ".join(str(part) for part in parts if part) if settings else ""


def _cards(summary: RunSummary, metrics: MetricTable) -> list[dict[str, str]]:
    """The headline numbers."""
    steps = f"{summary.status.step:,}" + (f" / {summary.steps:,}" if summary.steps else "")
    cards = [{"name": "steps", "value": steps, "note": summary.status.condition}]
    shown = [
        ("reward/mean", "reward of the last step", "eval/constant_reward"),
        ("eval/pass@1", "held-out pass@1", "eval/constant_pass@1"),
        ("eval/reward/mean", "held-out reward", "eval/constant_reward"),
    ]
    if not measures_right(metrics.rows):
        del shown[1]
    for name, title, constant in shown:
        if points := [value for _, value in metrics.points(name) if math.isfinite(value)]:
            best = metrics.last(constant)
            note = f"first {number(points[0])}" + (f", best constant answer {number(best)}" if best is not None else "")
            cards.append({"name": title, "value": number(points[-1]), "note": note})
    seconds = sum(_finite(row.get(name)) for row in metrics.rows for name in ("time/step", "time/eval"))
    tokens = sum(_finite(row.get("tokens/sampled")) for row in metrics.rows)
    cards.append({"name": "time", "value": duration(seconds), "note": f"{tokens:,.0f} tokens sampled"})
    return cards


def _range(metrics: MetricTable, name: str) -> dict[str, Any]:
    """A row of the table of all metrics. `last` is the newest value, also if it is not finite."""
    values = [value for _, value in metrics.points(name)]
    finite = [value for value in values if math.isfinite(value)]
    least, most = (min(finite), max(finite)) if finite else (None, None)
    return {"name": name, "first": values[0], "last": values[-1], "least": least, "most": most}


def _measures(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics of mode bench that its table shows: numbers of evaluations, without pass@k if it measures nothing."""
    numbers = [{name: value for name, value in row.items() if isinstance(value, int | float)} for row in results]
    names = dict.fromkeys(name for row in numbers for name in row if name.startswith("eval/"))
    return [name for name in names if "/pass@" not in name or measures_right(numbers)]


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _text(file: Path, last_bytes: int | None = None) -> str:
    """A text file, or its end."""
    try:
        with file.open("rb") as content:
            content.seek(max(0, file.stat().st_size - last_bytes) if last_bytes else 0)
            return content.read().decode(errors="replace")
    except OSError:
        return ""


def _mark(file: Path) -> tuple[int, int]:
    try:
        return (status := file.stat()).st_size, status.st_mtime_ns
    except OSError:
        return 0, 0


def _integer(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else default
