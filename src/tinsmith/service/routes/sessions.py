"""Client configuration, sessions and their heartbeats, capabilities and health of the server."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Response

from tinsmith.engine.training.loss_specs import EXTENSIONS
from tinsmith.errors import Gone
from tinsmith.service.dependencies import RawBody, ServiceDep, Tenant
from tinsmith.service.wire.schemas import FinishBody, HeartbeatBody, SessionBody, parse

router = APIRouter()

CLIENT_CONFIG = {
    "credential_default_source": "api_key",
    # Sequential chunks: requests arrive in seq_id order, and a gap is a seq_id that will never arrive.
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    # One long poll for each sampling session and clone instead of one for each sample.
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "sample_max_concurrent_requests": 2000,
    # SDKs before 0.25 and before 0.38 use the same routes with these flags.
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
    "create_model_via_load_weights": True,
}


@router.post("/client/config")
async def client_config(_tenant: Tenant, service: ServiceDep) -> dict[str, Any]:
    """Flags of the client. Bodies are compressed unless the server is bound to localhost."""
    compress = not service.config.is_loopback if service.config.compress is None else service.config.compress
    return {
        **CLIENT_CONFIG,
        "pjwt_auth_enabled": service.config.tokens,
        "proto_compress_fwdbwd": compress,
        "custom_loss_server_side": service.config.custom_losses,
    }


@router.post("/client/dynamic_config")
async def dynamic_config(_tenant: Tenant) -> dict[str, Any]:
    """Flags that the client refreshes every five minutes."""
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


@router.post("/create_session")
async def create_session(
    tenant: Tenant, service: ServiceDep, body: RawBody, x_idempotency_key: Annotated[str | None, Header()] = None
) -> dict[str, Any]:
    """Create a session; the same X-Idempotency-Key returns the same session."""
    session = await service.sessions.begin(tenant, x_idempotency_key, parse(SessionBody, body))
    return {"session_id": session.id, "type": "create_session"}


@router.post("/session_heartbeat")
async def session_heartbeat(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, str]:
    """Keep a session alive; 410 after its end."""
    session_id = parse(HeartbeatBody, body).session_id
    session = service.sessions.find(session_id, tenant)
    if session.ended is not None:
        raise Gone(f"Session {session_id} has ended ({session.ended}).", "Create another session.")
    await service.sessions.heartbeat(session_id, tenant)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish_session(session_id: str, tenant: Tenant, service: ServiceDep, body: RawBody) -> Response:
    """End a session: queued training still runs, then its models are unloaded; running samples are cancelled."""
    request = parse(FinishBody, body or b"{}")
    await service.sessions.end(service.sessions.find(session_id, tenant), request.reason.type, request.detail)
    await service.sampling.cancel_session(session_id)
    return Response(status_code=204)


@router.post("/telemetry")
async def telemetry(_tenant: Tenant) -> dict[str, str]:
    """Accept telemetry and discard it: it holds tracebacks and paths of the client's machine."""
    return {"status": "accepted"}


@router.get("/get_server_capabilities")
async def get_server_capabilities(_tenant: Tenant, service: ServiceDep) -> dict[str, Any]:
    """Served models with their context lengths, and extensions of the protocol by the field they belong to."""
    models = []
    for name, worker in service.workers.items():
        card = await worker.host.card()
        models.append(
            {
                "model_name": name,
                "max_context_length": card.context_length,
                "trainable": True,
                "sampleable": True,
            }
        )
    return {"supported_models": models, "extensions": {place: list(names) for place, names in EXTENSIONS.items()}}


@router.get("/healthz")
async def healthz(service: ServiceDep, response: Response) -> dict[str, Any]:
    """200 once all engines and samplers run, 503 while one is loading or restarting. Needs no key."""
    waiting = [name for name, worker in service.workers.items() if not worker.host.sampler_is_up]
    if waiting:
        response.status_code = 503
        return {"status": "loading", "waiting_for": waiting}
    return {"status": "ok"}
