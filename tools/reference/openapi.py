"""The OpenAPI schema of the service, from what its routes declare and the JSON schemas of their pydantic classes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tinsmith.service.app import endpoints
from tinsmith.service.http.auth import bearer_key, no_key
from tinsmith.service.http.endpoint import Endpoint

REF = "#/components/schemas/{model}"
BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_PATH_PART = re.compile(r"{(\w+)(?::\w+)?}")


def schema() -> dict[str, Any]:
    """The whole schema."""
    mounted = endpoints()
    models = dict.fromkeys(
        model
        for _, endpoint in mounted
        for model in (endpoint.params, endpoint.body.model if endpoint.body is not None else None)
        if model is not None
    )
    references, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    by_model = {model: reference for (model, _), reference in references.items()}
    paths: dict[str, dict[str, Any]] = {}
    for prefix, endpoint in mounted:
        operations = paths.setdefault(_PATH_PART.sub(r"{\1}", prefix + endpoint.path), {})
        for method in endpoint.methods:
            operations[method.lower()] = _operation(prefix, endpoint, method, by_model)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tinsmith", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
                "bearer": {"type": "http", "scheme": "bearer"},
            },
        },
    }


def _operation(prefix: str, endpoint: Endpoint, method: str, references: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W", "_", f"{method.lower()}{prefix}{endpoint.path}"),
        "summary": (endpoint.function.__doc__ or "").partition("\n\n")[0],
        "security": [] if endpoint.authenticate is no_key else [{"key": []}],
        "parameters": [*_path_parameters(endpoint), *_parameters(endpoint)],
        "responses": {str(endpoint.status): {"description": "The result."}},
    }
    if endpoint.authenticate is bearer_key:
        operation["security"].append({"bearer": []})
    if endpoint.body is not None:
        model = endpoint.body.model
        content = {"application/json": {"schema": references[model]}} if model is not None else BINARY
        operation["requestBody"] = {"content": content, "required": True}
    return operation


def _path_parameters(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    for name in _PATH_PART.findall(endpoint.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _parameters(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    if endpoint.params is None:
        return
    headers, model = endpoint.params.headers(), endpoint.params
    properties = model.model_json_schema(ref_template=REF)["properties"]
    for name, field in model.model_fields.items():
        place = {"name": headers[name], "in": "header"} if name in headers else {"name": name, "in": "query"}
        yield {**place, "required": field.is_required(), "schema": properties[name]}


def body_models() -> Iterator[tuple[str, type[BaseModel]]]:
    """Path and class of each JSON body, parameters in braces."""
    for prefix, endpoint in endpoints():
        if endpoint.body is not None and endpoint.body.model is not None:
            yield _PATH_PART.sub(r"{\1}", prefix + endpoint.path), endpoint.body.model
