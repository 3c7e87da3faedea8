"""The OpenAPI schema of the service, for fuzzing: routes read raw bodies, so what each parses is found in its source.

Ids of things that exist may be given: what is generated then gets further than "there is no such session".
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from tinsmith.service import routes
from tinsmith.service.app import create_app
from tinsmith.service.wire import schemas

REF = "#/components/schemas/{model}"
BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def schema(known: Mapping[str, str]) -> dict[str, Any]:
    """`known`: field or parameter -> the id of something that exists, used half of the time."""
    app = create_app(SimpleNamespace(telemetry=None, drain=None))  # type: ignore[arg-type]
    made = get_openapi(title="Tinsmith", version="1", openapi_version="3.1.0", routes=app.routes)
    parsed = dict(_parsed())
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            operation["parameters"] = [
                {**one, "schema": _known(one["name"], one["schema"], known)}
                for one in operation.get("parameters", [])
                if one["name"] != "x-api-key"
            ]
            if method in ("get", "delete"):
                continue
            kind = parsed.get(operation["operationId"].removesuffix(f"_{method}"), _by_path(path))
            operation["requestBody"] = {"content": _content(made, kind, known) if kind else BINARY}
    return made


def _parsed() -> Iterator[tuple[str, type[schemas.WireModel]]]:
    """(the beginning of an operation's id, what its route parses)."""
    for info in pkgutil.iter_modules(routes.__path__):
        module = importlib.import_module(f"{routes.__name__}.{info.name}")
        for route in module.router.routes:
            assert isinstance(route, APIRoute)
            named = re.search(r"\b(?:parse(?:_exact)?\(|NewRequest\[)(\w+)[],]", inspect.getsource(route.endpoint))
            if named:
                for prefix in ("/api/v1", "/v1", "/oai/api/v1", "/inference/v1", ""):
                    name = re.sub(r"\W", "_", f"{route.name}{prefix}{route.path}")
                    yield name, route.endpoint.__globals__[named[1]]


def _by_path(path: str) -> type[schemas.WireModel] | None:
    return schemas.SampleBody if path.endswith("/asample") else None


def _content(made: dict[str, Any], kind: type[schemas.WireModel], known: Mapping[str, str]) -> dict[str, Any]:
    told = kind.model_json_schema(ref_template=REF)
    parts = {**told.pop("$defs", {}), kind.__name__: told}
    for part in parts.values():
        for name, field in part.get("properties", {}).items():
            part["properties"][name] = _known(name, field, known)
    made.setdefault("components", {}).setdefault("schemas", {}).update(parts)
    return {"application/json": {"schema": {"$ref": REF.format(model=kind.__name__)}}}


def _known(name: str, field: dict[str, Any], known: Mapping[str, str]) -> dict[str, Any]:
    return {"anyOf": [{"enum": [known[name]]}, field]} if name in known else field
