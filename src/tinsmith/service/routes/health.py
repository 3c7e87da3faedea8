"""Liveness, readiness and health, without a key: for supervisors, load balancers and the SDK.

`livez` and `readyz` are mounted at the root. Restart a server that is not alive; send no requests to one that is not
ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from tinsmith.service.http.auth import no_key
from tinsmith.service.http.endpoint import Call, Json, Routes, json_response
from tinsmith.service.http.parameters import Parameters
from tinsmith.service.training.worker import Worker

routes = Routes(authenticate=no_key)
probe_routes = Routes(authenticate=no_key)


@probe_routes.get("/livez")
async def livez(_call: Call[None]) -> Json:
    """200 while the process answers, also while models load and while it shuts down."""
    return {"status": "alive"}


class ReadyParameters(Parameters):
    """readyz."""

    model: str | None = None


@probe_routes.get("/readyz", params=ReadyParameters)
async def readyz(call: Call[None, ReadyParameters]) -> Response:
    """200 if every base model, or the one that `model` names, can train and sample; 503 otherwise, and from the
    beginning of a shutdown."""
    service, model = call.service, call.params.model
    workers = service.workers if model is None else {model: service.worker(model)}
    is_ready = all(worker.host.sampler_is_up for worker in workers.values()) and not service.drain.started
    state = {
        "status": "ready" if is_ready else "draining" if service.drain.started else "waiting",
        "models": {name: _model_state(worker) for name, worker in workers.items()},
        "database": "available" if service.store.is_available else "unavailable",
        "disk": "low" if service.disk.state().is_low else "ok",
    }
    return json_response(state, 200 if is_ready else 503)


@routes.get("/healthz")
async def healthz(call: Call[None]) -> Response:
    """200 if any base model can train and sample; 503 if none can, and until every engine was loaded once."""
    service = call.service
    waiting = [name for name, worker in service.workers.items() if not worker.host.sampler_is_up]
    is_loading = any(worker.host.state == "loading" for worker in service.workers.values())
    if is_loading or len(waiting) == len(service.workers):
        return json_response({"status": "loading" if is_loading else "restarting", "waiting_for": waiting}, 503)
    return json_response({"status": "ok", "waiting_for": waiting} if waiting else {"status": "ok"})


def _model_state(worker: Worker) -> Mapping[str, Any]:
    host = worker.host
    is_sampler_down = host.is_up and not host.sampler_is_up
    return {
        "state": "sampler down" if is_sampler_down else host.state,
        "seconds_without_progress": round(host.progress_age_s, 1),
    }
