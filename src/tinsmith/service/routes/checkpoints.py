"""Routes of one checkpoint: describe, copy, publish, expire, lend, download, delete.

Files of external weights and traces have signed links, whose signature and expiry replace a key.
"""

from __future__ import annotations

import os
import tarfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from email.utils import formatdate
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse

from tinsmith.errors import BadRequest, Busy, Gone, NotFound
from tinsmith.service.checkpoints import check_ttl, expiry
from tinsmith.service.http.auth import no_key
from tinsmith.service.http.bodies import JsonBody
from tinsmith.service.http.endpoint import Call, Json, Routes
from tinsmith.service.http.parameters import IdempotencyKey, InHeader, Parameters
from tinsmith.service.responses import rfc3339
from tinsmith.service.service import Service
from tinsmith.service.storage.records import Checkpoint
from tinsmith.service.tenancy.signing import LINK_S
from tinsmith.service.wire.management_schemas import CopyBody, LoanBody, TtlBody, WeightsInfoBody

routes = Routes()

CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"
ARCHIVE = "archive.tar"
"""Name of a file that every checkpoint's folder seems to have: a tar archive of the others."""
COMPLETE = "checkpoint_complete"
"""Empty file in an archive, which `tinker checkpoint push-hf` of SDKs before 0.36 looks for."""
LOAN_RANGE = (60, 315_360_000)


@routes.post("/weights_info", body=WeightsInfoBody)
async def weights_info(call: Call[WeightsInfoBody]) -> Json:
    """Describe a checkpoint for loading: base model and adapter."""
    checkpoint = call.service.checkpoints.readable(call.body.tinker_path, call.tenant)
    return {
        "base_model": checkpoint.base_model,
        "is_lora": True,
        "lora_rank": checkpoint.lora.rank,
        "train_unembed": checkpoint.lora.train_unembed,
        "train_mlp": checkpoint.lora.train_mlp,
        "train_attn": checkpoint.lora.train_attn,
        "optimizer_config": {"type": "adamw"},
    }


class CopyParameters(Parameters):
    """copy_weights."""

    x_idempotency_key: IdempotencyKey = None
    weights_access_token: Annotated[str | None, InHeader("x-tinker-weights-access-token")] = None


@routes.post("/copy_weights", body=CopyBody, params=CopyParameters)
async def copy_weights(call: Call[CopyBody, CopyParameters]) -> Json:
    """Copy a readable checkpoint into the caller's own; the same X-Idempotency-Key returns the same copy."""
    service, tenant, request = call.service, call.tenant, call.body
    check_ttl(request.ttl_seconds)
    token = call.params.weights_access_token or request.weights_access_token
    source = service.checkpoints.readable(request.source_path, tenant, service.token_owner(token, request.source_path))
    service.quotas.check_storage(tenant)
    copy, is_new = await service.copies.copy(source, tenant, request, call.params.x_idempotency_key)
    if is_new:
        service.audit_log.checkpoint_read(source, tenant, "copy")
        service.audit_log.checkpoint_created(copy, tenant, copied_from=source.path)
        service.sessions.wake()
    return {"tinker_path": copy.path}


@routes.post(f"{CHECKPOINT}/publish")
async def publish(call: Call[None]) -> Response:
    """Make a checkpoint readable for every key. Idempotent."""
    return await _change(call.service, _own(call), "checkpoint_published", public=True)


@routes.delete(f"{CHECKPOINT}/publish")
async def unpublish(call: Call[None]) -> Response:
    """Make a checkpoint readable for its owner only; sampling sessions that use it continue."""
    return await _change(call.service, _own(call), "checkpoint_unpublished", public=False)


@routes.put(f"{CHECKPOINT}/ttl", body=TtlBody)
async def set_ttl(call: Call[TtlBody]) -> Response:
    """Set the seconds until a checkpoint is deleted; null keeps it."""
    check_ttl(call.body.ttl_seconds)
    expires = expiry(call.body.ttl_seconds)
    response = await _change(call.service, _own(call), "checkpoint_ttl_set", expires=expires)
    call.service.sessions.wake()
    return response


@routes.post(f"{CHECKPOINT}/access_token", body=JsonBody(LoanBody, optional=True))
async def lend(call: Call[LoanBody]) -> Json:
    """Issue a weights_access_token for one checkpoint, valid for a day unless ttl_seconds says otherwise."""
    service, tenant, request = call.service, call.tenant, call.body
    low, high = LOAN_RANGE
    if not low <= request.ttl_seconds <= high:
        raise BadRequest(f"ttl_seconds is {request.ttl_seconds}.", f"Give {low} to {high}.")
    checkpoint = _own(call)
    token = service.signer.issue_weights_token(tenant, checkpoint.path, request.ttl_seconds)
    service.audit_log.checkpoint_changed(checkpoint, "checkpoint_lent", tenant, ttl_seconds=request.ttl_seconds)
    return {"weights_access_token": token, "expires_at": rfc3339(time.time() + request.ttl_seconds)}


@routes.get(f"{CHECKPOINT}/external_weights_urls")
async def external_weights_urls(call: Call[None]) -> Json:
    """Signed links of the checkpoint's files, valid for an hour without a key."""
    service, tenant = call.service, call.tenant
    checkpoint = service.checkpoints.readable(_path(call), tenant)
    if checkpoint.kind != "external_weights":
        raise BadRequest(f"{checkpoint.path} holds no external weights.", "Save it with save_weights_external.")
    expires = int(time.time()) + LINK_S
    files = sorted(file.name for file in (await service.checkpoints.present(checkpoint)).iterdir())
    urls = {file: service.signed_link(call.http, f"{checkpoint.id}/{file}", expires) for file in files}
    service.audit_log.checkpoint_read(checkpoint, tenant, "download")
    return {"urls": urls, "expires": rfc3339(expires)}


@routes.get(f"{CHECKPOINT}/archive")
async def archive(call: Call[None]) -> RedirectResponse:
    """Redirect to a signed link of a tar archive of the checkpoint's files. Only SDKs before 0.36 call this route."""
    service, tenant = call.service, call.tenant
    checkpoint = service.checkpoints.readable(_path(call), tenant)
    if not (await service.checkpoints.present(checkpoint)).is_dir():
        raise Busy(f"{checkpoint.path} is still being written.", "Retry in a moment.")
    expires = int(time.time()) + LINK_S
    service.audit_log.checkpoint_read(checkpoint, tenant, "download")
    url = service.signed_link(call.http, f"{checkpoint.id}/{ARCHIVE}", expires)
    return RedirectResponse(url, 302, {"Expires": formatdate(expires, usegmt=True)})


@routes.delete(CHECKPOINT)
async def delete_checkpoint(call: Call[None]) -> Response:
    """Delete a checkpoint; sampling sessions that use its weights continue."""
    checkpoint = _own(call)
    await call.service.checkpoints.delete(checkpoint)
    call.service.audit_log.checkpoint_changed(checkpoint, "checkpoint_deleted", call.tenant)
    return Response(status_code=204)


def _path(call: Call[Any]) -> str:
    return f"tinker://{call.path('run')}/{call.path('kind')}/{call.path('name')}"


def _own(call: Call[Any]) -> Checkpoint:
    return call.service.checkpoints.owned(_path(call), call.tenant)


async def _change(service: Service, checkpoint: Checkpoint, event: str, **changes: Any) -> Response:
    await service.store.update(Checkpoint, checkpoint.id, **changes)
    service.audit_log.checkpoint_changed(checkpoint, event, checkpoint.owner, **changes)
    return Response(status_code=204)


class FileParameters(Parameters):
    """files."""

    expires: int
    signature: str


@routes.route(("GET", "HEAD"), "/files/{folder}/{name}", params=FileParameters, auth=no_key)
async def get_file(call: Call[None, FileParameters]) -> Response:
    """Download a file of external weights, or a trace, by its signed link."""
    service, folder, name = call.service, call.path("folder"), call.path("name")
    if not service.signer.verify_link(f"{folder}/{name}", call.params.expires, call.params.signature):
        raise NotFound("The link's signature is not valid.", "Request new links; they must not be changed.")
    if call.params.expires <= time.time():
        raise Gone("The link has expired.", "Request new links.")
    if folder == "traces":
        file = service.traces.file(name)
    else:
        checkpoint = service.store.find(Checkpoint, folder)
        here = await service.checkpoints.present(checkpoint) if checkpoint else service.checkpoints.folder(folder)
        if name == ARCHIVE and here.is_dir():
            return _archive_response(here)
        file = here / name
    if not file.is_file():
        raise NotFound(f"{name} does not exist any more.", "It was deleted after the link was issued.")
    return FileResponse(file, filename=name, media_type="application/octet-stream")


def _archive_response(folder: Path) -> StreamingResponse:
    """A tar archive of a folder, written while it is sent. All files are opened first: a deletion does not cut it."""
    files = [file.open("rb") for file in sorted(folder.iterdir())]
    entries = [_tar_entry(Path(file.name).name, os.fstat(file.fileno()).st_size) for file in files]
    size = sum(len(head) + file_size + len(padding) for head, file_size, padding in entries)
    end = _tar_entry(COMPLETE, 0)[0] + bytes(2 * tarfile.BLOCKSIZE)

    def content() -> Iterator[bytes]:
        with ExitStack() as stack:
            for file in files:
                stack.enter_context(file)
            for file, (head, _, padding) in zip(files, entries, strict=True):
                yield head
                yield from _chunks(file)
                yield padding
            yield end

    headers = {"content-length": str(size + len(end)), "content-disposition": f'attachment; filename="{ARCHIVE}"'}
    return StreamingResponse(content(), media_type="application/x-tar", headers=headers)


def _tar_entry(name: str, size: int) -> tuple[bytes, int, bytes]:
    """(header, size of the content, padding after it) of a file in a tar archive."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime = size, int(time.time())
    return info.tobuf(tarfile.USTAR_FORMAT), size, bytes(-size % tarfile.BLOCKSIZE)


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(1 << 20):
        yield chunk
