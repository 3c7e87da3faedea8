"""Pages of rollouts: those that a filter selects, and one whole beside its group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import get_args
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinsmith.dashboard.pages import Pages
from tinsmith.dashboard.runs import Runs
from tinsmith.rl.history import RolloutFilter, Sort
from tinsmith.rl.history.rollout_html import PAGE, rollout_html
from tinsmith.rl.history.transcript import Measure

_ROWS = 50
_INDEX_S = 0.3
"""Time that a page may add files to the index; the page says how many are left, and goes on as it refreshes."""
_GROUP = 64
"""Most rollouts of a group that one page shows."""
_PAGE = 500_000
"""Characters of a group that one page shows."""
_YES_NO = {"yes": True, "no": False}


class RolloutPages:
    """Endpoints of the pages of rollouts. They read files, and run in threads."""

    def __init__(self, runs: Runs, pages: Pages) -> None:
        self._runs, self._pages = runs, pages

    @property
    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/runs/{run}/rollouts", self.list_rollouts),
            Route("/runs/{run}/rollouts/{rollout}", self.show_rollout),
        ]

    def list_rollouts(self, request: Request) -> Response:
        """The rollouts that the query selects, those of the newest steps first."""
        if (entry := self._runs.find(request.path_params["run"])) is None:
            return self._unknown(request)
        query = {name: value.strip() for name, value in request.query_params.items() if value.strip()}
        sort: Sort = query.get("sort") if query.get("sort") in get_args(Sort) else "step"  # type: ignore[assignment]
        page = max(1, int(_number(query.get("page")) or 1))
        index = self._runs.open(entry).rollouts
        selection = selection_of(query)
        result = index.find(
            selection,
            sort=sort,
            descending=query.get("order") != "up",
            limit=_ROWS,
            offset=(page - 1) * _ROWS,
            seconds=_INDEX_S,
        )
        return self._pages.render(
            request,
            "rollouts.html",
            entry=entry,
            query=query,
            result=result,
            page=page,
            pages=max(1, math.ceil(result.total / _ROWS)),
            roles=index.values("roles", seconds=0.0),
            environments=index.values("environment", seconds=0.0),
            sorts=get_args(Sort),
            is_running=self._runs.summary(entry).status.condition == "running",
        )

    def show_rollout(self, request: Request) -> Response:
        """A rollout whole, beside the others of its group."""
        entry = self._runs.find(request.path_params["run"])
        index = self._runs.open(entry).rollouts if entry is not None else None
        row = index.row(request.path_params["rollout"]) if index is not None else None
        if entry is None or index is None or row is None:
            return self._unknown(request)
        color = request.query_params.get("color", "")
        measure: Measure | None = color if color in get_args(Measure) else None  # type: ignore[assignment]
        rest = "?" + urlencode({"color": color, "all": "1"})
        rows = index.group(row)[:_GROUP]
        share = _PAGE // max(1, len(rows))
        group = [
            (each, rollout_html(index.read(each), measure, with_task=False, characters=share, rest=f"{each.id}{rest}"))
            for each in rows
        ]
        whole = request.query_params.get("all") == "1"
        return self._pages.render(
            request,
            "rollout.html",
            live=False,
            entry=entry,
            row=row,
            whole=rollout_html(index.read(row), measure, characters=None if whole else PAGE, rest=rest),
            group=group,
            measure=measure or "",
            measures=("", *get_args(Measure)),
        )

    def _unknown(self, request: Request) -> Response:
        text = "Its run or its step is not there any more, or never was."
        return self._pages.message(request, "There is no such rollout", text, code=404)


def selection_of(query: Mapping[str, str]) -> RolloutFilter:
    """The filter that the fields of the form describe; what is no number or no choice of a field selects all."""
    kind = query.get("kind", "train")
    steps = (_number(query.get("from")), _number(query.get("to")))
    return RolloutFilter(
        kind="eval" if kind == "eval" else None if kind == "all" else "train",
        steps=(_whole(steps[0]), _whole(steps[1])),
        task=query.get("task", ""),
        role=query.get("role", ""),
        environment=query.get("environment", ""),
        reward=(_number(query.get("least")), _number(query.get("most"))),
        correct=_YES_NO.get(query.get("correct", "")),
        failed=_YES_NO.get(query.get("failed", "")),
        cut=_YES_NO.get(query.get("cut", "")),
        search=query.get("q", ""),
    )


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) and abs(value) < 1e15 else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
