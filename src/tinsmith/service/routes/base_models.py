"""Base models of a running server, for administrators: list, load, replace, unload."""

from __future__ import annotations

from dataclasses import asdict

from tinsmith.errors import BadRequest
from tinsmith.service.http.auth import admin_key
from tinsmith.service.http.endpoint import Call, Json, Routes
from tinsmith.service.wire.schemas import LoadBaseModelBody

routes = Routes("/admin/base_models", admin_key)


@routes.get("")
async def list_base_models(call: Call[None]) -> Json:
    """Base models with their sources and states; those that failed to load with their errors."""
    return {"base_models": [asdict(status) for status in call.service.base_models.status()]}


@routes.post("", body=LoadBaseModelBody, status=202)
async def load_base_model(call: Call[LoadBaseModelBody]) -> Json:
    """Begin to load a base model; the list says when it is served. `replace`: in place of the one of this name."""
    request = call.body
    if not request.name:
        raise BadRequest("The base model has no name.", "Send name, and source unless it is the same.")
    call.service.base_models.load(request.name, request.source or request.name, replace=request.replace)
    return {"status": "loading"}


@routes.delete("/{name:path}", status=202)
async def unload_base_model(call: Call[None]) -> Json:
    """Begin to unload a base model: the running batch ends, what waits is kept until the model is loaded again."""
    call.service.base_models.unload(call.path("name"))
    return {"status": "unloading"}
