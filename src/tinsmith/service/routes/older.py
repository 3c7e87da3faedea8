"""Routes that only SDKs before 0.26 call: a client could end a model; now models end with their session."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from tinsmith.service.bodies import UnloadBody, parse
from tinsmith.service.deps import RawBody, ServiceDep, Tenant
from tinsmith.service.records import Answer

router = APIRouter()


@router.post("/unload_model")
async def unload_model(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, Any]:
    """End a model after all that waits for it; its checkpoints stay."""
    model = service.model(parse(UnloadBody, body).model_id, tenant)
    if model.state != "ended":
        service.worker(model.base_model).drop(model)
    request_id = f"{model.id}:unload"
    service.futures.open(request_id, tenant, stored=True)
    service.futures.keep(request_id, Answer.of({"model_id": model.id, "type": "unload_model"}))
    return {"request_id": request_id, "model_id": model.id}
