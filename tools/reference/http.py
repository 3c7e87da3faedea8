"""The routes of the service and the JSON bodies that they read, from the routers themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from fastapi.routing import iter_route_contexts
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tinsmith.service import frequent_routes
from tinsmith.service.app import create_app
from tools.reference.settings import values_of

_PARSED = re.compile(r"\b(?:parse(?:_exact)?\(\s*|NewRequest\[)(\w+)")


def routes() -> str:
    """A table for each router: method, path, body, and what the route does."""
    modules: dict[str, list[Any]] = {}
    for route in _routes():
        modules.setdefault(route.endpoint.__module__.removeprefix("tinsmith.service."), []).append(route)
    return "\n\n".join(_module_table(module, routes) for module, routes in modules.items())


def bodies() -> str:
    """The fields of each body, a section each."""
    kinds = dict.fromkeys(kind for route in _routes() for kind in _bodies_of(route))
    return "\n\n".join(_fields(kind) for kind in sorted(kinds, key=lambda kind: kind.__name__))


def _routes() -> Iterator[Any]:
    app = create_app(SimpleNamespace(telemetry=None, drain=None))  # type: ignore[arg-type]
    routes: Iterator[Any] = iter_route_contexts(app.routes)
    own = (route for route in routes if route.endpoint.__module__ != frequent_routes.__name__)
    return (route for route in own if not route.path.startswith("/oai"))


def _module_table(module: str, routes: list[Any]) -> str:
    lines = [f"### {module}", "", "| method | path | body | |", "| --- | --- | --- | --- |"]
    for route in routes:
        kinds = " · ".join(f"[{kind.__name__}](#{kind.__name__.lower()})" for kind in _bodies_of(route))
        about = " ".join((inspect.getdoc(route.endpoint) or "").partition("\n\n")[0].split()).replace("|", "\\|")
        lines.append(f"| {', '.join(sorted(route.methods))} | `{route.path}` | {kinds} | {about} |")
    return "\n".join(lines)


def _bodies_of(route: Any) -> list[type[BaseModel]]:
    """The pydantic classes that a route's own source parses its body into."""
    names = _PARSED.findall(inspect.getsource(route.endpoint))
    types = [route.endpoint.__globals__[name] for name in dict.fromkeys(names) if name in route.endpoint.__globals__]
    return [kind for kind in types if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _fields(kind: type[BaseModel]) -> str:
    lines = [f"### {kind.__name__}", "", "| field | values | default |", "| --- | --- | --- |"]
    for name, field in kind.model_fields.items():
        nested = _nested(field.annotation)
        values = nested.__name__ if nested else values_of(field)
        lines.append(f"| `{field.alias or name}` | {values} | {_default(field)} |")
    return "\n".join(lines)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if isinstance(value, BaseModel) or value in (None, "", (), [], {}) else f"`{value}`"


def _nested(annotation: object) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
