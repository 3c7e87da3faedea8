"""Routes of one checkpoint: describe, copy, publish, expire, lend, download, delete.

Files of external weights and traces have signed links, whose signature and expiry replace a key.
"""

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
    """Describe a checkpoint for loading: base model and adapter."""
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
    """Copy a readable checkpoint into the caller's own; the same X-Idempotency-Key returns the same copy."""
    request = parse(CopyBody, body)
    check_ttl(request.ttl_seconds)
    token = x_tinker_weights_access_token or request.weights_access_token
    source = service.checkpoints.readable(request.source_path, tenant, service.token_owner(token, request.source_path))
    service.quotas.check_storage(tenant)
    copy, is_new = await service.copies.copy(source, tenant, request, x_idempotency_key)
    if is_new:
        service.audit_log.checkpoint_read(source, tenant, "copy")
        service.audit_log.checkpoint_created(copy, tenant, copied_from=source.path)
        service.sessions.wake()
    return {"tinker_path": copy.path}


@router.post(f"{CHECKPOINT}/publish")
async def publish(run: str, kind: str, name: str, tenant: Tenant, service: ServiceDep) -> Response:
    """Make a checkpoint readable for every key. Idempotent."""
    return await _change(service, _own(service, tenant, run, kind, name), "checkpoint_published", public=True)


@router.delete(f"{CHECKPOINT}/publish")
async def unpublish(run: str, kind: str, name: str, tenant: Tenant, service: ServiceDep) -> Response:
    """Make a checkpoint readable for its owner only; sampling sessions that use it continue."""
    return await _change(service, _own(service, tenant, run, kind, name), "checkpoint_unpublished", public=False)


@router.put(f"{CHECKPOINT}/ttl")
async def set_ttl(run: str, kind: str, name: str, tenant: Tenant, service: ServiceDep, body: RawBody) -> Response:
    """Set the seconds until a checkpoint is deleted; null keeps it."""
    request = parse(TtlBody, body)
    check_ttl(request.ttl_seconds)
    checkpoint = _own(service, tenant, run, kind, name)
    response = await _change(service, checkpoint, "checkpoint_ttl_set", expires=expiry(request.ttl_seconds))
    service.sessions.wake()
    return response


@router.post(f"{CHECKPOINT}/access_token")
async def lend(run: str, kind: str, name: str, tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, str]:
    """Issue a weights_access_token for one checkpoint, valid for a day unless ttl_seconds says otherwise."""
    request = parse(LoanBody, body or b"{}")
    low, high = LOAN_RANGE
    if not low <= request.ttl_seconds <= high:
        raise BadRequest(f"ttl_seconds is {request.ttl_seconds}.", f"Give {low} to {high}.")
    checkpoint = _own(service, tenant, run, kind, name)
    token = service.signer.issue_weights_token(tenant, checkpoint.path, request.ttl_seconds)
    service.audit_log.checkpoint_changed(checkpoint, "checkpoint_lent", tenant, ttl_seconds=request.ttl_seconds)
    return {"weights_access_token": token, "expires_at": rfc3339(time.time() + request.ttl_seconds)}


@router.get(f"{CHECKPOINT}/external_weights_urls")
async def external_weights_urls(
    run: str, kind: str, name: str, tenant: Tenant, service: ServiceDep, request: Request
) -> dict[str, Any]:
    """Signed links of the checkpoint's files, valid for an hour without a key."""
    checkpoint = service.checkpoints.readable(_path(run, kind, name), tenant)
    if checkpoint.kind != "external_weights":
        raise BadRequest(f"{checkpoint.path} holds no external weights.", "Save it with save_weights_external.")
    expires = int(time.time()) + LINK_S
    files = sorted(file.name for file in service.checkpoints.folder(checkpoint.id).iterdir())
    urls = {file: service.signed_link(request, f"{checkpoint.id}/{file}", expires) for file in files}
    service.audit_log.checkpoint_read(checkpoint, tenant, "download")
    return {"urls": urls, "expires": rfc3339(expires)}


@router.delete(CHECKPOINT)
async def delete_checkpoint(run: str, kind: str, name: str, tenant: Tenant, service: ServiceDep) -> Response:
    """Delete a checkpoint; sampling sessions that use its weights continue."""
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
    """Download a file of external weights, or a trace, by its signed link."""
    if not service.signer.verify_link(f"{folder}/{name}", expires, signature):
        raise NotFound("The link's signature is not valid.", "Request new links; they must not be changed.")
    if expires <= time.time():
        raise Gone("The link has expired.", "Request new links.")
    file = service.traces.file(name) if folder == "traces" else service.checkpoints.folder(folder) / name
    if not file.is_file():
        raise NotFound(f"{name} does not exist any more.", "It was deleted after the link was issued.")
    return FileResponse(file, filename=name, media_type="application/octet-stream")
