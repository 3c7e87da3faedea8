"""Client configuration, sessions and their heartbeats, and capabilities of the server."""

from __future__ import annotations

from dataclasses import asdict

from starlette.responses import Response

from tinsmith.engine.training.loss_specs import EXTENSIONS
from tinsmith.errors import Gone
from tinsmith.service.checkpoints import LIVE
from tinsmith.service.http.bodies import JsonBody
from tinsmith.service.http.endpoint import Call, Json, Routes
from tinsmith.service.http.parameters import IdempotencyKey, Parameters
from tinsmith.service.wire.schemas import FinishBody, HeartbeatBody, SessionBody

routes = Routes()

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


@routes.post("/client/config")
async def client_config(call: Call[None]) -> Json:
    """Flags of the client. Bodies are compressed unless the server is bound to localhost."""
    config = call.service.config
    compress = not config.is_loopback if config.compress is None else config.compress
    return {
        **CLIENT_CONFIG,
        "pjwt_auth_enabled": config.tokens,
        "proto_compress_fwdbwd": compress,
        "custom_loss_server_side": config.custom_losses,
    }


@routes.post("/client/dynamic_config")
async def dynamic_config(_call: Call[None]) -> Json:
    """Flags that the client refreshes every five minutes."""
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


class SessionParameters(Parameters):
    """create_session."""

    x_idempotency_key: IdempotencyKey = None


@routes.post("/create_session", body=SessionBody, params=SessionParameters)
async def create_session(call: Call[SessionBody, SessionParameters]) -> Json:
    """Create a session; the same X-Idempotency-Key returns the same session."""
    session = await call.service.sessions.begin(call.tenant, call.params.x_idempotency_key, call.body)
    return {"session_id": session.id, "type": "create_session"}


@routes.post("/session_heartbeat", body=HeartbeatBody)
async def session_heartbeat(call: Call[HeartbeatBody]) -> Json:
    """Keep a session alive; 410 after its end."""
    session_id, sessions = call.body.session_id, call.service.sessions
    session = sessions.find(session_id, call.tenant)
    if session.ended is not None:
        raise Gone(f"Session {session_id} has ended ({session.ended}).", "Create another session.")
    sessions.heartbeat(session_id, call.tenant)
    return {"type": "session_heartbeat"}


@routes.post("/sessions/{session_id}/finish", body=JsonBody(FinishBody, optional=True))
async def finish_session(call: Call[FinishBody]) -> Response:
    """End a session: queued training still runs, then its models are unloaded; running samples are cancelled."""
    session = call.service.sessions.find(call.path("session_id"), call.tenant)
    await call.service.sessions.end(session, call.body.reason.type, call.body.detail)
    await call.service.sampling.cancel_session(session.id)
    return Response(status_code=204)


@routes.get("/sessions/{session_id}/queue")
async def get_waits(call: Call[None]) -> Json:
    """What a session waits for: each queue in which it has requests and none of them runs, with the reason."""
    return {"waits": call.service.waits(call.service.sessions.find(call.path("session_id"), call.tenant).id)}


@routes.post("/telemetry")
async def telemetry(_call: Call[None]) -> Json:
    """Accept telemetry and discard it: it holds tracebacks and paths of the client's machine."""
    return {"status": "accepted"}


@routes.get("/get_server_capabilities")
async def get_server_capabilities(call: Call[None]) -> Json:
    """Served models with their context lengths, routers and whether they take images, and extensions of the protocol by
    the field they extend."""
    models = []
    for name, worker in call.service.workers.items():
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
