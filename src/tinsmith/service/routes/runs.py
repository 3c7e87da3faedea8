"""Training runs and the lists of their checkpoints. A run is a model, ended or not."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse

from tinsmith.errors import NotFound
from tinsmith.service.deps import Service, ServiceDep, Tenant
from tinsmith.service.records import Checkpoint, Model, Session
from tinsmith.service.views import PROJECT, checkpoint_view, run_view

router = APIRouter()

Limit = Annotated[int, Query(ge=0)]
"""Never capped: clients take a page that is shorter than they asked for as the last."""
Offset = Annotated[int, Query(ge=0)]
Scope = Literal["owned", "accessible"]
"""What is one's own, or also what others have published."""


@router.get("/training_runs")
async def list_training_runs(
    tenant: Tenant,
    service: ServiceDep,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: str | None = None,
) -> JSONResponse:
    """Runs, newest first."""
    shared = service.checkpoints.published() if access_scope == "accessible" else {}
    runs = [
        model
        for model in service.store.all(Model)
        if (model.owner == tenant or model.id in shared)
        and (project_id is None or _project(service, model) == project_id)
    ]
    runs.sort(key=lambda model: model.created, reverse=True)
    page = await _views(service, tenant, runs[offset : offset + limit])
    cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
    return JSONResponse({"training_runs": page, "cursor": cursor})


@router.get("/training_runs/{run}")
async def get_training_run(
    run: str, tenant: Tenant, service: ServiceDep, access_scope: Scope = "owned"
) -> dict[str, Any]:
    """One run with its newest checkpoint of each kind."""
    model = service.store.find(Model, run)
    shared = access_scope == "accessible" and run in service.checkpoints.published()
    if model is None or not (model.owner == tenant or shared):
        raise NotFound(f"There is no training run {run}.", "List those there are with GET training_runs.")
    [view] = await _views(service, tenant, [model])
    return view


@router.get("/training_runs/{run}/checkpoints")
async def list_checkpoints(run: str, tenant: Tenant, service: ServiceDep) -> JSONResponse:
    """All of a run's checkpoints: the client sends no paging and reads no cursor. Of another's, the published ones."""
    seen = _seen(service, tenant, run)
    model = service.store.find(Model, run)
    if not seen and (model is None or model.owner != tenant):
        raise NotFound(f"There is no training run {run}.", "List those there are with GET training_runs.")
    return await asyncio.to_thread(_rendered, seen, {})


@router.get("/checkpoints")
async def list_user_checkpoints(
    tenant: Tenant, service: ServiceDep, limit: Limit = 100, offset: Offset = 0
) -> JSONResponse:
    """Checkpoints over all runs, newest first."""
    found = service.checkpoints.of_owner(tenant)
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return await asyncio.to_thread(_rendered, found[offset : offset + limit], {"cursor": cursor})


def _rendered(found: list[Checkpoint], more: dict[str, Any]) -> JSONResponse:
    """In a thread: ten thousand take a tenth of a second, in which others are to have their answers."""
    return JSONResponse({"checkpoints": [checkpoint_view(one) for one in found], **more})


async def _views(service: Service, tenant: str, models: list[Model]) -> list[dict[str, Any]]:
    last = await service.store.last_used(models)
    return [
        run_view(
            model,
            _seen(service, tenant, model.id),
            used,
            corrupted=model.state == "failed" or service.is_broken(model),
            own=model.owner == tenant,
        )
        for model, used in zip(models, last, strict=True)
    ]


def _seen(service: Service, tenant: str, run: str) -> list[Checkpoint]:
    return [one for one in service.checkpoints.of_run(run) if one.public or one.owner == tenant]


def _project(service: Service, model: Model) -> str:
    session = service.store.find(Session, model.session_id)
    return (session.project_id if session else None) or PROJECT
