"""The OpenAPI schema of the service, for fuzzing: fields and parameters that name an object may be existing ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.reference import openapi


def schema(ids: Mapping[str, str]) -> dict[str, Any]:
    """The schema. `ids` maps a field or parameter to an existing id, which half of the requests use."""
    made = openapi.schema()
    for operations in made["paths"].values():
        for method, operation in operations.items():
            operation.pop("security")  # the caller sends its key
            operation["parameters"] = [
                {**item, "schema": _prefer_existing_id(item["name"], item["schema"], ids)}
                for item in operation["parameters"]
            ]
            if method in ("post", "put"):  # a body is ignored where none is read
                operation.setdefault("requestBody", {"content": openapi.BINARY})
    for part in made["components"]["schemas"].values():
        for name, field in part.get("properties", {}).items():
            part["properties"][name] = _prefer_existing_id(name, field, ids)
    made["components"].pop("securitySchemes")
    return made


def _prefer_existing_id(name: str, field: dict[str, Any], ids: Mapping[str, str]) -> dict[str, Any]:
    return {"anyOf": [{"enum": [ids[name]]}, field]} if name in ids else field
