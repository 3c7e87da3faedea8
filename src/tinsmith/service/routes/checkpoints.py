"""Training runs and their checkpoints. A run is a model, ended or not."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Response

from tinsmith.service.bodies import WeightsInfoBody, parse
from tinsmith.service.deps import RawBody, ServiceDep, Tenant
from tinsmith.service.records import Checkpoint

router = APIRouter()

_TYPES = {"weights": "training", "sampler_weights": "sampler"}


@router.post("/weights_info")
async def weights_info(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, Any]:
    """What must be known to load a checkpoint."""
    checkpoint = service.checkpoints.find(parse(WeightsInfoBody, body).tinker_path, tenant)
    return {
        "base_model": checkpoint.base_model,
        "is_lora": True,
        "lora_rank": checkpoint.lora.rank,
        "train_unembed": checkpoint.lora.train_unembed,
        "train_mlp": checkpoint.lora.train_mlp,
        "train_attn": checkpoint.lora.train_attn,
        "optimizer_config": {"type": "adamw"},
    }


@router.get("/training_runs/{run}")
async def get_training_run(run: str, tenant: Tenant, service: ServiceDep) -> dict[str, Any]:
    """One run with its newest checkpoint of each kind."""
    model = service.model(run, tenant)
    newest = {one.kind: _shown(one) for one in service.checkpoints.of_run(run)}
    metadata = {key: str(value) for key, value in (model.metadata or {}).items()}
    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": model.owner,
        "is_lora": True,
        "corrupted": model.state == "failed",
        "lora_rank": model.lora.rank,
        "last_request_time": _time(await service.store.last_used(model)),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": metadata or None,
    }


@router.get("/training_runs/{run}/checkpoints")
async def list_checkpoints(run: str, tenant: Tenant, service: ServiceDep) -> dict[str, Any]:
    """All of a run's checkpoints: the client sends no paging and reads no cursor."""
    service.model(run, tenant)
    return {"checkpoints": [_shown(one) for one in service.checkpoints.of_run(run)]}


@router.delete("/training_runs/{run}/checkpoints/{kind}/{name}")
async def delete_checkpoint(run: str, kind: str, name: str, tenant: Tenant, service: ServiceDep) -> Response:
    """The name goes at once; sampling sessions that use the weights go on."""
    await service.checkpoints.delete(service.checkpoints.find(f"tinker://{run}/{kind}/{name}", tenant))
    return Response(status_code=204)


def _shown(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": False,
        "user_metadata": checkpoint.metadata,
        "expires_at": _time(checkpoint.expires) if checkpoint.expires is not None else None,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
