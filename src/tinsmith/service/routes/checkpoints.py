"""What is done to one checkpoint: known, copied, deleted, published, lent, given an end, fetched."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import FileResponse

from tinsmith.errors import BadRequest, Gone, NotFound
from tinsmith.service.checkpoints import check_ttl, expiry
from tinsmith.service.dependencies import RawBody, Service, ServiceDep, Tenant
from tinsmith.service.responses import rfc3339
from tinsmith.service.storage.records import Checkpoint
from tinsmith.service.tenancy.signing import LINK_S
from tinsmith.service.wire.schemas import CopyBody, LoanBody, TtlBody, WeightsInfoBody, parse

router = APIRouter()

CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"
LOAN_RANGE = (60, 315_360_000)


@router.post("/weights_info")
async def weights_info(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, Any]:
    """What must be known to load a checkpoint."""
    checkpoint = service.checkpoints.readable(parse(WeightsInfoBody, body).tinker_path, tenant)
    return {
        "base_model": checkpoint.base_model,
        "is_lora": True,
        "lora_rank": checkpoint.lora.rank,
        "train_unembed": checkpoint.lora.train_unembed,
        "train_mlp": checkpoint.lora.train_mlp,
        "train_attn": checkpoint.lora.train_attn,
        "optimizer_config": {"type": "adamw"},
    }


@router.post("/copy_weights")
async def copy_weights(
    tenant: Tenant,
    service: ServiceDep,
    body: RawBody,
    x_idempotency_key: Annotated[str | None, Header()] = None,
    x_tinker_weights_access_token: Annotated[str | None, Header()] = None,
) -> dict[str, str]:
    """A checkpoint of one's own from one that may be read; the same X-Idempotency-Key gives the same one."""
    asked = parse(CopyBody, body)
    check_ttl(asked.ttl_seconds)
    token = x_tinker_weights_access_token or asked.weights_access_token
    source = service.checkpoints.readable(asked.source_path, tenant, service.token_owner(token, asked.source_path))
    service.quotas.check_storage(tenant)
    made, is_new = await service.copies.copy(source, tenant, asked, x_idempotency_key)
    if is_new:
        service.audit_log.checkpoint_read(source, tenant, "copy")
        service.audit_log.checkpoint_created(made, tenant, copied_from=source.path)
        service.sessions.wake()
    return {"tinker_path": made.path}


@router.post(f"{CHECKPOINT}/publish")
async def publish(run: str, kind: str, name: str, tenant: Tenant, service: ServiceDep) -> Response:
    """Whoever has a key may read it from now on; again and again is fine."""
    return await _change(service, _own(service, tenant, run, kind, name), "checkpoint_published", public=True)


@router.delete(f"{CHECKPOINT}/publish")
async def unpublish(run: str, kind: str, name: str, tenant: Tenant, service: ServiceDep) -> Response:
    """Its owner alone may read it from now on; sampling sessions that use it go on."""
    return await _change(service, _own(service, tenant, run, kind, name), "checkpoint_unpublished", public=False)


@router.put(f"{CHECKPOINT}/ttl")
async def set_ttl(run: str, kind: str, name: str, tenant: Tenant, service: ServiceDep, body: RawBody) -> Response:
    """Seconds from now until it is deleted; null keeps it."""
    asked = parse(TtlBody, body)
    check_ttl(asked.ttl_seconds)
    checkpoint = _own(service, tenant, run, kind, name)
    answer = await _change(service, checkpoint, "checkpoint_ttl_set", expires=expiry(asked.ttl_seconds))
    service.sessions.wake()
    return answer


@router.post(f"{CHECKPOINT}/access_token")
async def lend(run: str, kind: str, name: str, tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, str]:
    """A weights_access_token that opens this checkpoint alone, for a day if nothing else is said."""
    asked = parse(LoanBody, body or b"{}")
    low, high = LOAN_RANGE
    if not low <= asked.ttl_seconds <= high:
        raise BadRequest(f"ttl_seconds is {asked.ttl_seconds}.", f"Give {low} to {high}.")
    checkpoint = _own(service, tenant, run, kind, name)
    token = service.signer.issue_loan(tenant, checkpoint.path, asked.ttl_seconds)
    service.audit_log.checkpoint_changed(checkpoint, "checkpoint_lent", tenant, ttl_seconds=asked.ttl_seconds)
    return {"weights_access_token": token, "expires_at": rfc3339(time.time() + asked.ttl_seconds)}


@router.get(f"{CHECKPOINT}/external_weights_urls")
async def external_weights_urls(
    run: str, kind: str, name: str, tenant: Tenant, service: ServiceDep, request: Request
) -> dict[str, Any]:
    """A link for each file, which needs no key and is good for an hour."""
    checkpoint = service.checkpoints.readable(_path(run, kind, name), tenant)
    if checkpoint.kind != "external_weights":
        raise BadRequest(f"{checkpoint.path} is not for use elsewhere.", "Save it with save_weights_external.")
    expires = int(time.time()) + LINK_S
    files = sorted(file.name for file in service.checkpoints.folder(checkpoint.id).iterdir())
    urls = {file: service.signed_link(request, f"{checkpoint.id}/{file}", expires) for file in files}
    service.audit_log.checkpoint_read(checkpoint, tenant, "download")
    return {"urls": urls, "expires": rfc3339(expires)}


@router.delete(CHECKPOINT)
async def delete_checkpoint(run: str, kind: str, name: str, tenant: Tenant, service: ServiceDep) -> Response:
    """The name goes at once; sampling sessions that use the weights go on."""
    checkpoint = _own(service, tenant, run, kind, name)
    await service.checkpoints.delete(checkpoint)
    service.audit_log.checkpoint_changed(checkpoint, "checkpoint_deleted", tenant)
    return Response(status_code=204)


def _path(run: str, kind: str, name: str) -> str:
    return f"tinker://{run}/{kind}/{name}"


def _own(service: Service, tenant: str, run: str, kind: str, name: str) -> Checkpoint:
    return service.checkpoints.owned(_path(run, kind, name), tenant)


async def _change(service: Service, checkpoint: Checkpoint, event: str, **changes: Any) -> Response:
    await service.store.update(Checkpoint, checkpoint.id, **changes)
    service.audit_log.checkpoint_changed(checkpoint, event, checkpoint.owner, **changes)
    return Response(status_code=204)


@router.get("/files/{folder}/{name}")
async def get_file(folder: str, name: str, expires: int, signature: str, service: ServiceDep) -> FileResponse:
    """One file of weights for use elsewhere, or a trace."""
    if not service.signer.verify_link(f"{folder}/{name}", expires, signature):
        raise NotFound("This link was not made here.", "Ask for links anew; they may not be changed.")
    if expires <= time.time():
        raise Gone("The time of this link is over.", "Ask for links anew.")
    file = service.traces.file(name) if folder == "traces" else service.checkpoints.folder(folder) / name
    if not file.is_file():
        raise NotFound(f"{name} is no longer here.", "It was deleted meanwhile.")
    return FileResponse(file, filename=name, media_type="application/octet-stream")
