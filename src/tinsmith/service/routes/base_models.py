"""Base models of a running server, for administrators: list, load, replace, unload."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends

from tinsmith.errors import BadRequest
from tinsmith.service.dependencies import RawBody, ServiceDep, get_admin
from tinsmith.service.wire.schemas import LoadBaseModelBody, parse

router = APIRouter(prefix="/admin/base_models", dependencies=[Depends(get_admin)])


@router.get("")
async def list_base_models(service: ServiceDep) -> dict[str, Any]:
    """Base models with their sources and states; those that failed to load with their errors."""
    return {"base_models": [asdict(status) for status in service.base_models.status()]}


@router.post("", status_code=202)
async def load_base_model(service: ServiceDep, body: RawBody) -> dict[str, str]:
    """Begin to load a base model; the list says when it is served. `replace`: in place of the one of this name."""
    request = parse(LoadBaseModelBody, body)
    if not request.name:
        raise BadRequest("The base model has no name.", "Send name, and source unless it is the same.")
    service.base_models.load(request.name, request.source or request.name, replace=request.replace)
    return {"status": "loading"}


@router.delete("/{name:path}", status_code=202)
async def unload_base_model(name: str, service: ServiceDep) -> dict[str, str]:
    """Begin to unload a base model: the running batch ends, what waits is kept until the model is loaded again."""
    service.base_models.unload(name)
    return {"status": "unloading"}
