"""Who is asking: the token in place of a key, and what a key is."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from tinsmith.errors import BadRequest
from tinsmith.service.deps import Caller, ServiceDep
from tinsmith.service.keys import revoke_key

router = APIRouter()


@router.post("/auth/token")
async def auth_token(key: Caller, service: ServiceDep) -> dict[str, str]:
    """A token in place of the key; it says when it ends, or the client would ask before every request."""
    return {"jwt": service.token(key)}


@router.get("/auth/apikey/me")
async def get_key(key: Caller) -> dict[str, Any]:
    """What `tinker auth login` shows and keeps."""
    return {
        "key_id": key.id,
        "name": key.name,
        "note": "admin" if key.admin else "",
        "details": {"org_details": {"name": key.owner}, "user_details": {"email": key.owner}},
    }


@router.delete("/auth/apikey/me")
async def delete_key(key: Caller, service: ServiceDep) -> Response:
    """Revoke the key that is asking, and so its tokens; the server's own stays as long as the server."""
    if key.id == 0:
        raise BadRequest("This key is the server's own.", "Start the server with another --api-key.")
    await revoke_key(service.store.database, str(key.id))
    await service.tenants.read()
    return Response(status_code=204)
