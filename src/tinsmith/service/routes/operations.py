"""The administrator's view of all tenants: sessions, queues, who holds what; and the means to end it.

Every route needs an admin key. Other keys get 403, whatever they name.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import asdict
from typing import Any

from starlette.responses import Response

from tinsmith.errors import BadRequest, NotFound
from tinsmith.service.budgets.models import ModelUse
from tinsmith.service.engines.queue_view import QueueEntry
from tinsmith.service.http.auth import admin_key
from tinsmith.service.http.endpoint import Call, Json, Routes
from tinsmith.service.http.parameters import Parameters
from tinsmith.service.responses import DEFAULT_PROJECT, rfc3339
from tinsmith.service.service import Service
from tinsmith.service.storage.records import Checkpoint, Model, SamplingSession, Session
from tinsmith.service.training.worker import Worker

ENDED_BY_ADMIN = "administrator"
"""Why a session ended, and the actor in the audit log of its owner."""


routes = Routes("/admin", admin_key)


class AllSessionsParameters(Parameters):
    """admin/sessions."""

    ended: bool = False


@routes.get("/sessions", params=AllSessionsParameters)
async def list_all_sessions(call: Call[None, AllSessionsParameters]) -> Json:
    """Sessions of all tenants, those seen last first: owner, age, models, versions, bytes. `ended` adds ended ones."""
    service = call.service
    models, samplers = _by_session(service, Model), _by_session(service, SamplingSession)
    uses = {use.id: use for worker in _workers(service) for use in worker.models()}
    versions = defaultdict[str, list[Checkpoint]](list)
    for checkpoint in service.store.all(Checkpoint):
        versions[checkpoint.run.partition(":")[0]].append(checkpoint)
    sessions = [session for session in service.store.all(Session) if call.params.ended or session.ended is None]
    sessions.sort(key=service.sessions.last_seen, reverse=True)
    now = time.time()
    return {
        "sessions": [
            {
                "session_id": session.id,
                "owner": session.owner,
                "display_name": session.display_name,
                "project_id": session.project_id or DEFAULT_PROJECT,
                "created_at": rfc3339(session.created),
                "seen_s": round(now - service.sessions.last_seen(session), 1),
                "ended": session.ended,
                "models": [_model_json(model, uses.get(model.id)) for model in models[session.id]],
                "sampling_sessions": len(samplers[session.id]),
                "versions": sum(each.kind == "ephemeral" for each in versions[session.id]),
                "checkpoints": sum(each.kind != "ephemeral" for each in versions[session.id]),
                "disk_bytes": sum(each.size_bytes for each in versions[session.id]),
            }
            for session in sessions
        ]
    }


@routes.get("/queue")
async def list_queues(call: Call[None]) -> Json:
    """Requests without a result of all tenants, by base model and in the order in which they are expected to end.

    Training and samples are separate queues of each model.
    """
    return {
        "queues": [
            {"base_model": worker.host.names[0], "queue": name, "requests": [_entry_json(entry) for entry in entries]}
            for worker, name, entries in call.service.queues()
        ]
    }


@routes.get("/processes")
async def list_processes(call: Call[None]) -> Json:
    """The training and sampling processes of each base model: machine, GPUs, process id, load, versions."""
    return {
        "base_models": [
            {
                "base_model": worker.host.names[0],
                "source": worker.host.config.source,
                "state": worker.host.state,
                "processes": [asdict(process) for process in worker.host.processes()],
            }
            for worker in _workers(call.service)
        ]
    }


@routes.get("/usage")
async def list_holders(call: Call[None]) -> Json:
    """Who holds what: sessions, models in training, their memory, bytes on disk and unfinished requests."""
    service = call.service
    totals = defaultdict[str, Counter[str]](Counter)
    for session in service.store.all(Session):
        totals[session.owner]["sessions"] += session.ended is None
    uses = {use.id: use for worker in _workers(service) for use in worker.models()}
    for model in service.store.all(Model):
        totals[model.owner]["models"] += model.state in ("pending", "live")
        totals[model.owner]["memory_bytes"] += _memory(uses.get(model.id))
    for checkpoint in service.store.all(Checkpoint):
        kind = "version" if checkpoint.kind == "ephemeral" else "checkpoint"
        totals[checkpoint.owner][f"{kind}s"] += 1
        totals[checkpoint.owner][f"{kind}_bytes"] += checkpoint.size_bytes
    for _, _, entries in service.queues():
        for entry in entries:
            totals[entry.owner]["unfinished_requests"] += 1
    names = ("sessions", "models", "memory_bytes", "checkpoints", "checkpoint_bytes", "versions", "version_bytes")
    names += ("unfinished_requests",)
    return {
        "tenants": [
            {"owner": owner, **{name: total[name] for name in names}} for owner, total in sorted(totals.items())
        ]
    }


@routes.post("/sessions/{session_id}/end")
async def end_session(call: Call[None]) -> Response:
    """End a session of any tenant: queued training still runs, running samples are cancelled."""
    service, session_id = call.service, call.path("session_id")
    session = service.store.find(Session, session_id)
    if session is None:
        raise NotFound(f"There is no session {session_id}.", "`tinsmith admin sessions` lists them.")
    await service.sessions.end(session, ENDED_BY_ADMIN, f"ended with the key '{call.key.name}'")
    await service.sampling.cancel_session(session_id)
    return Response(status_code=204)


@routes.post("/models/{model_id}/end")
async def end_model(call: Call[None]) -> Response:
    """End a model of any tenant after its queued requests; its checkpoints stay."""
    service, model_id = call.service, call.path("model_id")
    model = service.store.find(Model, model_id)
    if model is None or model.state == "ended":
        raise NotFound(f"There is no model {model_id} in training.", "`tinsmith admin sessions` lists them.")
    service.worker(model.base_model).unload(model)
    return Response(status_code=204)


@routes.post("/requests/{request_id}/cancel")
async def cancel_request(call: Call[None]) -> Response:
    """Cancel a waiting or running sample or completion of any tenant; its client gets an error that says so.

    Training requests are not cancelled: each has its place in its model's order.
    """
    service, request_id = call.service, call.path("request_id")
    if service.store.find(Model, request_id.rpartition(":")[0]) is not None:
        model_id = request_id.rpartition(":")[0]
        raise BadRequest(f"{request_id} is a training request.", f"End its model (`tinsmith admin end {model_id}`).")
    if not await service.sampling.cancel(request_id):
        raise NotFound(f"There is no unfinished sample {request_id}.", "`tinsmith admin queue` lists them.")
    return Response(status_code=204)


def _entry_json(entry: QueueEntry) -> dict[str, Any]:
    return {name: round(value, 1) if isinstance(value, float) else value for name, value in asdict(entry).items()}


def _by_session(service: Service, kind: Any) -> dict[str, list[Any]]:
    by_session = defaultdict[str, list[Any]](list)
    for record in service.store.all(kind):
        by_session[record.session_id].append(record)
    return by_session


def _model_json(model: Model, use: ModelUse | None) -> dict[str, Any]:
    return {
        "model_id": model.id,
        "base_model": model.base_model,
        "rank": model.lora.rank,
        "state": model.state,
        "in_memory": use is not None and use.is_loaded,
        "memory_bytes": _memory(use),
    }


def _memory(use: ModelUse | None) -> int:
    """Memory of the engine that a model takes; an evicted one is on disk only."""
    return use.size_bytes if use is not None and use.is_loaded else 0


def _workers(service: Service) -> list[Worker]:
    """Each worker once: several served names may share a worker."""
    return list({id(worker): worker for worker in service.workers.values()}.values())
