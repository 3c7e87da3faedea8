"""Sessions looked at from outside: listed, searched, put into a project."""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from tinsmith.service.bodies import parse
from tinsmith.service.bodies_manage import ProjectBody, SearchBody, StatusQuery
from tinsmith.service.deps import RawBody, Service, ServiceDep, Tenant
from tinsmith.service.records import Checkpoint, Model, Sampler, Session
from tinsmith.service.routes.runs import Limit, Offset, Scope
from tinsmith.service.signing import LINK_S, urn
from tinsmith.service.views import PROJECT, instant, texts

router = APIRouter()

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
        "sampler_ids": [one.id for one in service.store.all(Sampler) if one.session_id == session.id],
        "user_metadata": texts(session.metadata),
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
    cursor = {"last_created_at": instant(page[-1].created), "last_session_id": page[-1].id} if more else None
    return {"sessions": _summaries(service, page), "next_cursor": cursor}


@router.get("/sessions/{session_id}/trace_export")
async def export_trace(session_id: str, tenant: Tenant, service: ServiceDep, request: Request) -> dict[str, Any]:
    """A link to the times of the session's requests, once the file is there."""
    name = await service.traces.export(service.sessions.find(session_id, tenant))
    if name is None:
        return {"status": "pending"}
    return {"status": "ready", "url": service.link(request, f"traces/{name}", int(time.time()) + LINK_S)}


@router.put("/sessions/{session_id}/project")
async def assign_project(session_id: str, tenant: Tenant, service: ServiceDep, body: RawBody) -> Response:
    """Put a session, and so all that it made, into a project, whose name is free."""
    project = parse(ProjectBody, body).project_id
    session = service.sessions.find(session_id, tenant)
    await service.store.change(Session, session.id, project_id=project)
    told = {"session_id": session.id, "project_id": project, "before": session.project_id or PROJECT}
    service.chronicle.audit(tenant, "project_session_assigned", tenant, **told)
    return Response(status_code=204)


def _own(service: Service, tenant: str) -> list[Session]:
    return sorted((one for one in service.store.all(Session) if one.owner == tenant), key=_order, reverse=True)


def _order(session: Session) -> tuple[datetime, str]:
    """As a cursor has it: to the microsecond."""
    return datetime.fromtimestamp(session.created, UTC), session.id


def _matches(session: Session, asked: SearchBody) -> bool:
    if asked.project_ids is not None and (session.project_id or PROJECT) not in asked.project_ids:
        return False
    metadata = texts(session.metadata) or {}
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
            "created_at": instant(session.created),
            "owner": urn(session.owner),
            "project_id": session.project_id or PROJECT,
            "status": _status(session),
            "checkpoints_count": count[session.id],
            "display_name": session.display_name,
            "user_metadata": texts(session.metadata),
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
