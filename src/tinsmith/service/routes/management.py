"""Management API: training runs, their checkpoints, and sessions. A training run is a model, ended or not."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from tinsmith.errors import NotFound
from tinsmith.service.dependencies import RawBody, Service, ServiceDep, Tenant
from tinsmith.service.responses import DEFAULT_PROJECT, checkpoint_json, metadata_texts, rfc3339, training_run_json
from tinsmith.service.storage.records import Checkpoint, Model, SamplingSession, Session
from tinsmith.service.tenancy.signing import LINK_S, urn
from tinsmith.service.wire.management_schemas import ProjectBody, SearchBody, StatusQuery
from tinsmith.service.wire.schemas import parse

router = APIRouter()

Limit = Annotated[int, Query(ge=0)]
"""Never capped: clients take a page shorter than the limit as the last."""
Offset = Annotated[int, Query(ge=0)]
Scope = Literal["owned", "accessible"]
"""The caller's own, or also what other tenants published."""


@router.get("/training_runs")
async def list_training_runs(
    tenant: Tenant,
    service: ServiceDep,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: str | None = None,
) -> JSONResponse:
    """Training runs, newest first."""
    shared = service.checkpoints.published() if access_scope == "accessible" else {}
    runs = [
        model
        for model in service.store.all(Model)
        if (model.owner == tenant or model.id in shared)
        and (project_id is None or _project(service, model) == project_id)
    ]
    runs.sort(key=lambda model: model.created, reverse=True)
    page = await _runs_json(service, tenant, runs[offset : offset + limit])
    cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
    return JSONResponse({"training_runs": page, "cursor": cursor})


@router.get("/training_runs/{run}")
async def get_training_run(
    run: str, tenant: Tenant, service: ServiceDep, access_scope: Scope = "owned"
) -> dict[str, Any]:
    """A training run with its newest checkpoint of each kind."""
    model = service.store.find(Model, run)
    shared = access_scope == "accessible" and run in service.checkpoints.published()
    if model is None or not (model.owner == tenant or shared):
        raise NotFound(f"There is no training run {run}.", "List training runs with GET training_runs.")
    [view] = await _runs_json(service, tenant, [model])
    return view


@router.get("/training_runs/{run}/checkpoints")
async def list_checkpoints(run: str, tenant: Tenant, service: ServiceDep) -> JSONResponse:
    """All checkpoints of a training run, unpaged; of another tenant's run, the published ones."""
    visible = _visible_checkpoints(service, tenant, run)
    model = service.store.find(Model, run)
    if not visible and (model is None or model.owner != tenant):
        raise NotFound(f"There is no training run {run}.", "List training runs with GET training_runs.")
    return await asyncio.to_thread(_checkpoints_response, visible, {})


@router.get("/checkpoints")
async def list_user_checkpoints(
    tenant: Tenant, service: ServiceDep, limit: Limit = 100, offset: Offset = 0
) -> JSONResponse:
    """The caller's checkpoints of all runs, newest first."""
    checkpoints = service.checkpoints.of_owner(tenant)
    cursor = {"offset": offset, "limit": limit, "total_count": len(checkpoints)}
    return await asyncio.to_thread(_checkpoints_response, checkpoints[offset : offset + limit], {"cursor": cursor})


def _checkpoints_response(checkpoints: list[Checkpoint], more: dict[str, Any]) -> JSONResponse:
    """Runs in a thread: ten thousand checkpoints take 0.1 s, which would block other requests."""
    return JSONResponse({"checkpoints": [checkpoint_json(checkpoint) for checkpoint in checkpoints], **more})


async def _runs_json(service: Service, tenant: str, models: list[Model]) -> list[dict[str, Any]]:
    last = await service.store.last_used(models)
    return [
        training_run_json(
            model,
            _visible_checkpoints(service, tenant, model.id),
            used,
            corrupted=model.state == "failed" or service.is_broken(model),
            own=model.owner == tenant,
        )
        for model, used in zip(models, last, strict=True)
    ]


def _visible_checkpoints(service: Service, tenant: str, run: str) -> list[Checkpoint]:
    return [
        checkpoint for checkpoint in service.checkpoints.of_run(run) if checkpoint.public or checkpoint.owner == tenant
    ]


def _project(service: Service, model: Model) -> str:
    session = service.store.find(Session, model.session_id)
    return (session.project_id if session else None) or DEFAULT_PROJECT


FINISHED = ("success", "errored", "interrupted")
"""Reasons with which clients finish sessions; a session that timed out has none of them."""


@router.get("/sessions")
async def list_sessions(
    tenant: Tenant, service: ServiceDep, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
) -> dict[str, list[str]]:
    """Ids of the caller's sessions, newest first. Sessions are never published, so both scopes are equal."""
    return {"sessions": [session.id for session in _own_sessions(service, tenant)[offset : offset + limit]]}


@router.get("/sessions/{session_id}")
async def get_session(
    session_id: str, tenant: Tenant, service: ServiceDep, access_scope: Scope = "owned"
) -> dict[str, Any]:
    """A session with its training runs and sampling sessions."""
    session = service.sessions.find(session_id, tenant)
    return {
        "training_run_ids": [model.id for model in service.store.all(Model) if model.session_id == session.id],
        "sampler_ids": [
            sampler.id for sampler in service.store.all(SamplingSession) if sampler.session_id == session.id
        ],
        "user_metadata": metadata_texts(session.metadata),
        "display_name": session.display_name,
    }


@router.post("/sessions/search")
async def search_sessions(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, Any]:
    """One page of the sessions that match every filter, newest first."""
    request = parse(SearchBody, body)
    if request.owner.type == "user" and urn(tenant) not in request.owner.owner_urns:
        return {"sessions": [], "next_cursor": None}
    after = (request.cursor.last_created_at, request.cursor.last_session_id) if request.cursor else None
    matches = [
        session
        for session in _own_sessions(service, tenant)
        if (after is None or _order(session) < after) and _matches(session, request)
    ]
    page = matches[: request.limit]
    more = len(matches) > len(page)
    cursor = {"last_created_at": rfc3339(page[-1].created), "last_session_id": page[-1].id} if more else None
    return {"sessions": _summaries(service, page), "next_cursor": cursor}


@router.get("/sessions/{session_id}/trace_export")
async def export_trace(session_id: str, tenant: Tenant, service: ServiceDep, request: Request) -> dict[str, Any]:
    """A link to a Perfetto trace of the session's requests, once the file is written."""
    session = service.sessions.find(session_id, tenant)
    service.disk.require()
    name = await service.traces.export(session)
    if name is None:
        return {"status": "pending"}
    return {"status": "ready", "url": service.signed_link(request, f"traces/{name}", int(time.time()) + LINK_S)}


@router.put("/sessions/{session_id}/project")
async def assign_project(session_id: str, tenant: Tenant, service: ServiceDep, body: RawBody) -> Response:
    """Assign a session, with all its runs and checkpoints, to a project; any name is a project."""
    project = parse(ProjectBody, body).project_id
    session = service.sessions.find(session_id, tenant)
    await service.store.update(Session, session.id, project_id=project)
    details = {"session_id": session.id, "project_id": project, "before": session.project_id or DEFAULT_PROJECT}
    service.audit_log.record(tenant, "project_session_assigned", tenant, **details)
    return Response(status_code=204)


def _own_sessions(service: Service, tenant: str) -> list[Session]:
    return sorted(
        (session for session in service.store.all(Session) if session.owner == tenant), key=_order, reverse=True
    )


def _order(session: Session) -> tuple[datetime, str]:
    """Sort key: the creation time to the microsecond, as a cursor holds it."""
    return datetime.fromtimestamp(session.created, UTC), session.id


def _matches(session: Session, request: SearchBody) -> bool:
    if request.project_ids is not None and (session.project_id or DEFAULT_PROJECT) not in request.project_ids:
        return False
    metadata = metadata_texts(session.metadata) or {}
    if any(metadata.get(key) != value for key, value in request.user_metadata.items()):
        return False
    if request.statuses is not None and not any(_has_status(session, query) for query in request.statuses):
        return False
    if request.session_id is None and request.display_name is None:
        return True
    name = (session.display_name or "").lower()
    words = (request.display_name or "").lower().split()
    return session.id == request.session_id or (bool(words) and all(word in name for word in words))


def _has_status(session: Session, query: StatusQuery) -> bool:
    """`cancelled` and `failed` match nothing: sessions are neither cancelled by a console nor failed by a request."""
    if query.type == "active":
        return session.ended is None
    return query.type == "client_finished" and session.ended in (query.reasons or FINISHED)


def _summaries(service: Service, page: list[Session]) -> list[dict[str, Any]]:
    ids = {session.id for session in page}
    runs = {model.id: model.session_id for model in service.store.all(Model) if model.session_id in ids}
    count, size = Counter[str](), Counter[str]()
    for checkpoint in service.store.all(Checkpoint):
        if checkpoint.run in runs and checkpoint.kind != "ephemeral" and not checkpoint.deleted:
            count[runs[checkpoint.run]] += 1
            size[runs[checkpoint.run]] += checkpoint.size_bytes
    return [
        {
            "session_id": session.id,
            "created_at": rfc3339(session.created),
            "owner": urn(session.owner),
            "project_id": session.project_id or DEFAULT_PROJECT,
            "status": _status(session),
            "checkpoints_count": count[session.id],
            "display_name": session.display_name,
            "user_metadata": metadata_texts(session.metadata),
            "checkpoint_storage_bytes": size[session.id],
        }
        for session in page
    ]


def _status(session: Session) -> dict[str, Any] | None:
    if session.ended is None:
        return {"type": "active"}
    if session.ended not in FINISHED:
        return None
    return {"type": "client_finished", "reason": {"type": session.ended}, "detail": session.detail}
