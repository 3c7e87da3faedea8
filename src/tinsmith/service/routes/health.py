"""Liveness, readiness and health, without a key: for supervisors, load balancers and the SDK.

`livez` and `readyz` are mounted at the root. Restart a server that is not alive; send no requests to one that is not
ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Response

from tinsmith.service.dependencies import ServiceDep
from tinsmith.service.training.worker import Worker

router = APIRouter()
probe_router = APIRouter()


@probe_router.get("/livez")
async def livez() -> dict[str, str]:
    """200 while the process answers, also while models load and while it shuts down."""
    return {"status": "alive"}


@probe_router.get("/readyz")
async def readyz(service: ServiceDep, response: Response, model: str | None = None) -> dict[str, Any]:
    """200 if every base model, or the one that `model` names, can train and sample; 503 otherwise, and from the
    beginning of a shutdown."""
    workers = service.workers if model is None else {model: service.worker(model)}
    is_ready = all(worker.host.sampler_is_up for worker in workers.values()) and not service.drain.started
    response.status_code = 200 if is_ready else 503
    return {
        "status": "ready" if is_ready else "draining" if service.drain.started else "waiting",
        "models": {name: _model_state(worker) for name, worker in workers.items()},
        "database": "available" if service.store.is_available else "unavailable",
        "disk": "low" if service.disk.state().is_low else "ok",
    }


@router.get("/healthz")
async def healthz(service: ServiceDep, response: Response) -> dict[str, Any]:
    """200 if any base model can train and sample; 503 if none can, and until every engine was loaded once."""
    waiting = [name for name, worker in service.workers.items() if not worker.host.sampler_is_up]
    is_loading = any(worker.host.state == "loading" for worker in service.workers.values())
    if is_loading or len(waiting) == len(service.workers):
        response.status_code = 503
        return {"status": "loading" if is_loading else "restarting", "waiting_for": waiting}
    return {"status": "ok", "waiting_for": waiting} if waiting else {"status": "ok"}


def _model_state(worker: Worker) -> Mapping[str, Any]:
    host = worker.host
    is_sampler_down = host.is_up and not host.sampler_is_up
    return {
        "state": "sampler down" if is_sampler_down else host.state,
        "seconds_without_progress": round(host.progress_age_s, 1),
    }
