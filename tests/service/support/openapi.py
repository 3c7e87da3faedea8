"""The OpenAPI schema of the service, for fuzzing.

Routes read raw bodies, so the types of the bodies are read from the source of the routes.
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
from tinsmith.service.openai import routes as openai
from tinsmith.service.wire import schemas

REF = "#/components/schemas/{model}"
BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def paths() -> dict[str, dict[str, Any]]:
    """Operations of the schema by path and method: all routes."""
    return _made()["paths"]


def _made() -> dict[str, Any]:
    app = create_app(SimpleNamespace(telemetry=None, drain=None))  # type: ignore[arg-type]
    return get_openapi(title="Tinsmith", version="1", openapi_version="3.1.0", routes=app.routes)


def schema(ids: Mapping[str, str]) -> dict[str, Any]:
    """The schema. `ids` maps a field or parameter to an existing id, which half of the requests use."""
    made = _made()
    parsed = dict(_parsed())
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            operation["parameters"] = [
                {**item, "schema": _prefer_existing_id(item["name"], item["schema"], ids)}
                for item in operation.get("parameters", [])
                if item["name"] != "x-api-key"
            ]
            if method in ("get", "head", "delete"):
                continue
            kind = _body_type(parsed, path, method, operation)
            operation["requestBody"] = {"content": _content(made, kind, ids) if kind else BINARY}
    return made


def bodies() -> Iterator[tuple[str, type[schemas.WireModel]]]:
    """Path and body type of each route with a JSON body, parameters in braces."""
    parsed = dict(_parsed())
    for path, operations in paths().items():
        for method, operation in operations.items():
            kind = _body_type(parsed, path, method, operation) if method in ("post", "put") else None
            if kind is not None:
                yield path, kind


def _body_type(
    parsed: Mapping[str, type[schemas.WireModel]], path: str, method: str, operation: Mapping[str, Any]
) -> type[schemas.WireModel] | None:
    return parsed.get(operation["operationId"].removesuffix(f"_{method}"), _by_path(path))


def _parsed() -> Iterator[tuple[str, type[schemas.WireModel]]]:
    """Pairs of an operation-id prefix and the body type of its route."""
    routers = [
        importlib.import_module(f"{routes.__name__}.{info.name}").router
        for info in pkgutil.iter_modules(routes.__path__)
    ]
    for router in (*routers, openai.router, openai.generate_router):
        for route in router.routes:
            assert isinstance(route, APIRoute)
            named = re.search(
                r"\b(?:parse(?:_exact)?(?:\(|, )|NewRequest\[)(\w+)[],]", inspect.getsource(route.endpoint)
            )
            if named:
                for prefix in ("/api/v1", "/v1", "/oai/api/v1", "/inference/v1", ""):
                    name = re.sub(r"\W", "_", f"{route.name}{prefix}{route.path}")
                    yield name, vars(inspect.getmodule(route.endpoint))[named[1]]


def _by_path(path: str) -> type[schemas.WireModel] | None:
    return schemas.SampleBody if path.endswith("/asample") else None


def _content(made: dict[str, Any], kind: type[schemas.WireModel], ids: Mapping[str, str]) -> dict[str, Any]:
    schema_ = kind.model_json_schema(ref_template=REF)
    parts = {**schema_.pop("$defs", {}), kind.__name__: schema_}
    for part in parts.values():
        for name, field in part.get("properties", {}).items():
            part["properties"][name] = _prefer_existing_id(name, field, ids)
    made.setdefault("components", {}).setdefault("schemas", {}).update(parts)
    return {"application/json": {"schema": {"$ref": REF.format(model=kind.__name__)}}}


def _prefer_existing_id(name: str, field: dict[str, Any], ids: Mapping[str, str]) -> dict[str, Any]:
    return {"anyOf": [{"enum": [ids[name]]}, field]} if name in ids else field
