"""Files behind signed links: no key is asked for, the signature and its time are all there is."""

from __future__ import annotations

import time

from fastapi import APIRouter
from fastapi.responses import FileResponse

from tinsmith.errors import Gone, NotFound
from tinsmith.service.deps import ServiceDep

router = APIRouter()


@router.get("/files/{folder}/{name}")
async def get_file(folder: str, name: str, expires: int, signature: str, service: ServiceDep) -> FileResponse:
    """One file of weights for use elsewhere, or a trace."""
    if not service.signer.is_link(f"{folder}/{name}", expires, signature):
        raise NotFound("This link was not made here.", "Ask for links anew; they may not be changed.")
    if expires <= time.time():
        raise Gone("The time of this link is over.", "Ask for links anew.")
    file = service.traces.file(name) if folder == "traces" else service.checkpoints.folder(folder) / name
    if not file.is_file():
        raise NotFound(f"{name} is no longer here.", "It was deleted meanwhile.")
    return FileResponse(file, filename=name, media_type="application/octet-stream")
