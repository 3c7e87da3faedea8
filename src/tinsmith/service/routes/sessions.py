"""Client configuration, sessions and their heartbeats, and capabilities of the server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Response

from tinsmith.engine.training.loss_specs import EXTENSIONS
from tinsmith.errors import Gone
from tinsmith.service.checkpoints import LIVE
from tinsmith.service.dependencies import IdempotencyKey, RawBody, ServiceDep, Tenant
from tinsmith.service.wire.schemas import FinishBody, HeartbeatBody, SessionBody, parse

router = APIRouter()

RECORDING = ("return_routed_experts",)
"""Fields of asample that this server adds."""
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
    tenant: Tenant, service: ServiceDep, body: RawBody, x_idempotency_key: IdempotencyKey = None
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
    service.sessions.heartbeat(session_id, tenant)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish_session(session_id: str, tenant: Tenant, service: ServiceDep, body: RawBody) -> Response:
    """End a session: queued training still runs, then its models are unloaded; running samples are cancelled."""
    request = parse(FinishBody, body or b"{}")
    await service.sessions.end(service.sessions.find(session_id, tenant), request.reason.type, request.detail)
    await service.sampling.cancel_session(session_id)
    return Response(status_code=204)


@router.get("/sessions/{session_id}/queue")
async def get_waits(session_id: str, tenant: Tenant, service: ServiceDep) -> dict[str, Any]:
    """What a session waits for: each queue in which it has requests and none of them runs, with the reason."""
    return {"waits": service.waits(service.sessions.find(session_id, tenant).id)}


@router.post("/telemetry")
async def telemetry(_tenant: Tenant) -> dict[str, str]:
    """Accept telemetry and discard it: it holds tracebacks and paths of the client's machine."""
    return {"status": "accepted"}


@router.get("/get_server_capabilities")
async def get_server_capabilities(_tenant: Tenant, service: ServiceDep) -> dict[str, Any]:
    """Served models with their context lengths, routers and whether they take images, and extensions of the protocol by
    the field they extend."""
    models = []
    for name, worker in service.workers.items():
        card = await worker.host.card()
        models.append(
            {
                "model_name": name,
                "max_context_length": card.context_length,
                "trainable": True,
                "sampleable": True,
                "router": None if card.router is None else asdict(card.router),
                "images": card.images is not None,
                "general_path_fault": card.general_path_fault,
            }
        )
    extensions = {place: list(names) for place, names in {**EXTENSIONS, "path": (LIVE,), "asample": RECORDING}.items()}
    return {"supported_models": models, "extensions": extensions}
