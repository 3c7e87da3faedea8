"""Rendering: templates with everything escaped, and the forms in which numbers, times and sizes are shown."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from functools import cached_property
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse

from tinsmith.dashboard.access import Access, cookie_of
from tinsmith.plurals import display_bytes, display_seconds
from tinsmith.rl.history.rollout_html import STYLE


class Pages:
    """Renders the templates of the dashboard."""

    def __init__(self, access: Access, *, has_runs: bool, has_service: bool) -> None:
        self._access, self._has_runs, self._has_service = access, has_runs, has_service

    @cached_property
    def _version(self) -> str:
        """Changes with the static files, so that browsers may keep them."""
        contents = sorted((each.name, each.read_bytes()) for each in (files("tinsmith.dashboard") / "static").iterdir())
        contents.append(("rollout.css", STYLE.encode()))
        return hashlib.sha256(repr(contents).encode()).hexdigest()[:12]

    @cached_property
    def _environment(self) -> jinja2.Environment:
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("tinsmith.dashboard"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.ChainableUndefined,  # a record of a damaged file may lack anything
        )
        environment.filters.update(FILTERS)
        return environment

    def render(self, request: Request, template: str, *, code: int = 200, **values: Any) -> HTMLResponse:
        """The page of a template, with the values that every page has."""
        root, path = request.scope.get("root_path", ""), request.url.path
        frame = {
            "root": root,
            "address": f"{path}?{request.url.query}" if request.url.query else path,
            "version": self._version,
            "section": "service" if path.startswith(f"{root}/service") else "runs",
            "has_runs": self._has_runs,
            "has_service": self._has_service,
            "logged_in": bool(self._access.logins.key(cookie_of(request.headers))),
            "live": True,
        }
        return HTMLResponse(self._environment.get_template(template).render({**frame, **values}), code)

    def message(self, request: Request, heading: str, text: str, hint: str = "", code: int = 200) -> HTMLResponse:
        """A page with a sentence."""
        return self.render(request, "message.html", code=code, heading=heading, text=text, hint=hint)


def number(value: Any) -> str:
    """A number with four significant digits; a dash for none, or for one that is not finite."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def signed(value: Any) -> str:
    """A difference, with its sign."""
    return f"{value:+.3g}" if isinstance(value, int | float) else "–"


def exact(value: Any) -> str:
    """A number as JSON has it."""
    return json.dumps(value) if value is not None and math.isfinite(value) else "null"


def whole(value: float) -> str:
    """A count."""
    return f"{value:,.0f}"


def plain(value: Any) -> str:
    """The value; nothing for none."""
    return "" if value is None else str(value)


def duration(seconds: float) -> str:
    """Seconds in a fitting unit, with a digit after the point."""
    return display_seconds(seconds, digits=1)


def age(moment_s: float) -> str:
    """How long ago a Unix time was."""
    return f"{duration(max(0.0, time.time() - moment_s))} ago" if moment_s else ""


def moment(moment_s: float) -> str:
    """A Unix time as date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment_s)) if moment_s else ""


def at(settings: Mapping[str, Any], key: str) -> Any:
    """The setting at a dotted key; nothing if there is none."""
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return "" if value is None else value


def pair(value: str) -> tuple[str, str]:
    """A choice whose value is its text."""
    return value, value


def query(values: Mapping[str, Any]) -> str:
    """The values as the query of an address, without the empty ones."""
    return urlencode({key: value for key, value in values.items() if value not in ("", None, [], ())}, doseq=True)


FILTERS = {
    each.__name__: each for each in (number, signed, exact, whole, plain, duration, age, moment, at, pair, query)
} | {"size": display_bytes}
