"""Management API: training runs, their checkpoints, and sessions. A training run is a model, ended or not."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from pydantic import Field
from starlette.responses import JSONResponse, Response

from tinsmith.errors import NotFound
from tinsmith.service.http.endpoint import Call, Json, Routes
from tinsmith.service.http.parameters import Parameters
from tinsmith.service.responses import DEFAULT_PROJECT, checkpoint_json, metadata_texts, rfc3339, training_run_json
from tinsmith.service.service import Service
from tinsmith.service.storage.records import Checkpoint, Model, SamplingSession, Session
from tinsmith.service.tenancy.signing import LINK_S, urn
from tinsmith.service.wire.management_schemas import ProjectBody, SearchBody, StatusQuery

R = TypeVar("R")

routes = Routes()


class PageParameters(Parameters):
    """Which part of a list. `limit` is never capped: clients take a page shorter than it as the last."""

    limit: int = Field(default=20, ge=0)
    offset: int = Field(default=0, ge=0)


class ScopeParameters(Parameters):
    """The caller's own, or also what other tenants published."""

    access_scope: Literal["owned", "accessible"] = "owned"


class RunsParameters(ScopeParameters, PageParameters):
    """training_runs."""

    project_id: str | None = None


class CheckpointsParameters(PageParameters):
    """checkpoints."""

    limit: int = Field(default=100, ge=0)


class SessionsParameters(ScopeParameters, PageParameters):
    """sessions. Sessions are never published, so both scopes are equal."""


@routes.get("/training_runs", params=RunsParameters)
async def list_training_runs(call: Call[None, RunsParameters]) -> JSONResponse:
    """Training runs, newest first."""
    service, tenant, params = call.service, call.tenant, call.params
    shared = service.checkpoints.published() if params.access_scope == "accessible" else {}
    runs = [
        model
        for model in service.store.all(Model)
        if (model.owner == tenant or model.id in shared)
        and (params.project_id is None or _project(service, model) == params.project_id)
    ]
    runs.sort(key=lambda model: model.created, reverse=True)
    page = await _runs_json(service, tenant, _page(runs, params))
    cursor = _cursor(runs, params)
    return JSONResponse({"training_runs": page, "cursor": cursor})


def _page(records: Sequence[R], params: PageParameters) -> Sequence[R]:
    return records[params.offset : params.offset + params.limit]


def _cursor(records: Sequence[Any], params: PageParameters) -> dict[str, int]:
    return {"offset": params.offset, "limit": params.limit, "total_count": len(records)}


@routes.get("/training_runs/{run}", params=ScopeParameters)
async def get_training_run(call: Call[None, ScopeParameters]) -> Json:
    """A training run with its newest checkpoint of each kind."""
    service, tenant, run = call.service, call.tenant, call.path("run")
    model = service.store.find(Model, run)
    shared = call.params.access_scope == "accessible" and run in service.checkpoints.published()
    if model is None or not (model.owner == tenant or shared):
        raise NotFound(f"There is no training run {run}.", "List training runs with GET training_runs.")
    [view] = await _runs_json(service, tenant, [model])
    return view


@routes.get("/training_runs/{run}/checkpoints")
async def list_checkpoints(call: Call[None]) -> JSONResponse:
    """All checkpoints of a training run, unpaged; of another tenant's run, the published ones."""
    service, tenant, run = call.service, call.tenant, call.path("run")
    visible = _visible_checkpoints(service, tenant, run)
    model = service.store.find(Model, run)
    if not visible and (model is None or model.owner != tenant):
        raise NotFound(f"There is no training run {run}.", "List training runs with GET training_runs.")
    return await asyncio.to_thread(_checkpoints_response, visible, {})


@routes.get("/checkpoints", params=CheckpointsParameters)
async def list_user_checkpoints(call: Call[None, CheckpointsParameters]) -> JSONResponse:
    """The caller's checkpoints of all runs, newest first."""
    checkpoints = call.service.checkpoints.of_owner(call.tenant)
    more = {"cursor": _cursor(checkpoints, call.params)}
    return await asyncio.to_thread(_checkpoints_response, _page(checkpoints, call.params), more)


def _checkpoints_response(checkpoints: Sequence[Checkpoint], more: dict[str, Any]) -> JSONResponse:
    """Runs in a thread: ten thousand checkpoints take 0.1 s, which would block other requests."""
    return JSONResponse({"checkpoints": [checkpoint_json(checkpoint) for checkpoint in checkpoints], **more})


async def _runs_json(service: Service, tenant: str, models: Sequence[Model]) -> list[dict[str, Any]]:
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


@routes.get("/sessions", params=SessionsParameters)
async def list_sessions(call: Call[None, SessionsParameters]) -> Json:
    """Ids of the caller's sessions, newest first. Sessions are never published, so both scopes are equal."""
    return {"sessions": [session.id for session in _page(_own_sessions(call.service, call.tenant), call.params)]}


@routes.get("/sessions/{session_id}", params=ScopeParameters)
async def get_session(call: Call[None, ScopeParameters]) -> Json:
    """A session with its training runs and sampling sessions."""
    service = call.service
    session = service.sessions.find(call.path("session_id"), call.tenant)
    return {
        "training_run_ids": [model.id for model in service.store.all(Model) if model.session_id == session.id],
        "sampler_ids": [
            sampler.id for sampler in service.store.all(SamplingSession) if sampler.session_id == session.id
        ],
        "user_metadata": metadata_texts(session.metadata),
        "display_name": session.display_name,
    }


@routes.post("/sessions/search", body=SearchBody)
async def search_sessions(call: Call[SearchBody]) -> Json:
    """One page of the sessions that match every filter, newest first."""
    service, tenant, request = call.service, call.tenant, call.body
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


@routes.get("/sessions/{session_id}/trace_export")
async def export_trace(call: Call[None]) -> Json:
    """A link to a Perfetto trace of the session's requests, once the file is written."""
    service = call.service
    session = service.sessions.find(call.path("session_id"), call.tenant)
    service.disk.require()
    name = await service.traces.export(session)
    if name is None:
        return {"status": "pending"}
    return {"status": "ready", "url": service.signed_link(call.http, f"traces/{name}", int(time.time()) + LINK_S)}


@routes.put("/sessions/{session_id}/project", body=ProjectBody)
async def assign_project(call: Call[ProjectBody]) -> Response:
    """Assign a session, with all its runs and checkpoints, to a project; any name is a project."""
    service, tenant, project = call.service, call.tenant, call.body.project_id
    session = service.sessions.find(call.path("session_id"), tenant)
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
