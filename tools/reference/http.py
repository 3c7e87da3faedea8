"""The routes of the service and the JSON bodies that they read, from what the routes declare."""

from __future__ import annotations

import inspect

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tinsmith.service.app import endpoints
from tinsmith.service.http.endpoint import Endpoint
from tinsmith.service.openai.schemas import GenerateParams
from tools.reference.settings import values_of


def routes() -> str:
    """A table for each module of routes: method, path, body, and what the route does."""
    modules: dict[str, list[tuple[str, Endpoint]]] = {}
    for prefix, endpoint in _endpoints():
        module = endpoint.function.__module__.removeprefix("tinsmith.service.")
        modules.setdefault(module, []).append((prefix, endpoint))
    return "\n\n".join(_module_table(module, mounted) for module, mounted in modules.items())


def bodies() -> str:
    """The fields of each body, a section each; GenerateParams is a field of generate."""
    kinds = {model for _, endpoint in _endpoints() if (model := _body_of(endpoint)) is not None} | {GenerateParams}
    return "\n\n".join(_fields(kind) for kind in sorted(kinds, key=lambda kind: kind.__name__))


def _endpoints() -> list[tuple[str, Endpoint]]:
    return [(prefix, endpoint) for prefix, endpoint in endpoints() if not prefix.startswith("/oai")]


def _module_table(module: str, mounted: list[tuple[str, Endpoint]]) -> str:
    lines = [f"### {module}", "", "| method | path | body | |", "| --- | --- | --- | --- |"]
    for prefix, endpoint in mounted:
        kind = _body_of(endpoint)
        link = f"[{kind.__name__}](#{kind.__name__.lower()})" if kind is not None else ""
        about = " ".join((inspect.getdoc(endpoint.function) or "").partition("\n\n")[0].split()).replace("|", "\\|")
        lines.append(f"| {', '.join(sorted(endpoint.methods))} | `{prefix}{endpoint.path}` | {link} | {about} |")
    return "\n".join(lines)


def _body_of(endpoint: Endpoint) -> type[BaseModel] | None:
    return endpoint.body.model if endpoint.body is not None else None


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
