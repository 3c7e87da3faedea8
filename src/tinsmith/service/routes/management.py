"""Training runs and the lists of their checkpoints. A run is a model, ended or not."""

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
from tinsmith.service.responses import DEFAULT_PROJECT, checkpoint_view, metadata_texts, rfc3339, run_view
from tinsmith.service.storage.records import Checkpoint, Model, SamplingSession, Session
from tinsmith.service.tenancy.signing import LINK_S, urn
from tinsmith.service.wire.schemas import ProjectBody, SearchBody, StatusQuery, parse

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
    return (session.project_id if session else None) or DEFAULT_PROJECT


FINISHED = ("success", "errored", "interrupted")
"""What a client says at the end; a session that fell silent said nothing."""


@router.get("/sessions")
async def list_sessions(
    tenant: Tenant, service: ServiceDep, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
) -> dict[str, list[str]]:
    """Ids, newest first. Sessions are not published, so both scopes show one's own."""
    return {"sessions": [session.id for session in _own(service, tenant)[offset : offset + limit]]}


@router.get("/sessions/{session_id}")
async def get_session(
    session_id: str, tenant: Tenant, service: ServiceDep, access_scope: Scope = "owned"
) -> dict[str, Any]:
    """What a session made."""
    session = service.sessions.find(session_id, tenant)
    return {
        "training_run_ids": [one.id for one in service.store.all(Model) if one.session_id == session.id],
        "sampler_ids": [one.id for one in service.store.all(SamplingSession) if one.session_id == session.id],
        "user_metadata": metadata_texts(session.metadata),
        "display_name": session.display_name,
    }


@router.post("/sessions/search")
async def search_sessions(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, Any]:
    """One page of the sessions that match every filter, newest first."""
    asked = parse(SearchBody, body)
    if asked.owner.type == "user" and urn(tenant) not in asked.owner.owner_urns:
        return {"sessions": [], "next_cursor": None}
    after = (asked.cursor.last_created_at, asked.cursor.last_session_id) if asked.cursor else None
    found = [
        session
        for session in _own(service, tenant)
        if (after is None or _order(session) < after) and _matches(session, asked)
    ]
    page = found[: asked.limit]
    more = len(found) > len(page)
    cursor = {"last_created_at": rfc3339(page[-1].created), "last_session_id": page[-1].id} if more else None
    return {"sessions": _summaries(service, page), "next_cursor": cursor}


@router.get("/sessions/{session_id}/trace_export")
async def export_trace(session_id: str, tenant: Tenant, service: ServiceDep, request: Request) -> dict[str, Any]:
    """A link to the times of the session's requests, once the file is there."""
    name = await service.traces.export(service.sessions.find(session_id, tenant))
    if name is None:
        return {"status": "pending"}
    return {"status": "ready", "url": service.signed_link(request, f"traces/{name}", int(time.time()) + LINK_S)}


@router.put("/sessions/{session_id}/project")
async def assign_project(session_id: str, tenant: Tenant, service: ServiceDep, body: RawBody) -> Response:
    """Put a session, and so all that it made, into a project, whose name is free."""
    project = parse(ProjectBody, body).project_id
    session = service.sessions.find(session_id, tenant)
    await service.store.update(Session, session.id, project_id=project)
    told = {"session_id": session.id, "project_id": project, "before": session.project_id or DEFAULT_PROJECT}
    service.audit_log.record(tenant, "project_session_assigned", tenant, **told)
    return Response(status_code=204)


def _own(service: Service, tenant: str) -> list[Session]:
    return sorted((one for one in service.store.all(Session) if one.owner == tenant), key=_order, reverse=True)


def _order(session: Session) -> tuple[datetime, str]:
    """As a cursor has it: to the microsecond."""
    return datetime.fromtimestamp(session.created, UTC), session.id


def _matches(session: Session, asked: SearchBody) -> bool:
    if asked.project_ids is not None and (session.project_id or DEFAULT_PROJECT) not in asked.project_ids:
        return False
    metadata = metadata_texts(session.metadata) or {}
    if any(metadata.get(key) != value for key, value in asked.user_metadata.items()):
        return False
    if asked.statuses is not None and not any(_stands(session, query) for query in asked.statuses):
        return False
    if asked.session_id is None and asked.display_name is None:
        return True
    name = (session.display_name or "").lower()
    words = (asked.display_name or "").lower().split()
    return session.id == asked.session_id or (bool(words) and all(word in name for word in words))


def _stands(session: Session, query: StatusQuery) -> bool:
    """`cancelled` and `failed` match nothing: there is no console to cancel in, and no request fails its session."""
    if query.type == "active":
        return session.ended is None
    return query.type == "client_finished" and session.ended in (query.reasons or FINISHED)


def _summaries(service: Service, page: list[Session]) -> list[dict[str, Any]]:
    wanted = {session.id for session in page}
    runs = {one.id: one.session_id for one in service.store.all(Model) if one.session_id in wanted}
    count, size = Counter[str](), Counter[str]()
    for one in service.store.all(Checkpoint):
        if one.run in runs and one.kind != "ephemeral" and not one.deleted:
            count[runs[one.run]] += 1
            size[runs[one.run]] += one.size_bytes
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
