"""Who is asking, what was done, and what was used: of the owner behind the key, nobody else's."""

from __future__ import annotations

import ipaddress
from datetime import UTC, date, datetime
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from tinsmith.errors import BadRequest
from tinsmith.service.dependencies import Caller, ServiceDep, Tenant, admin
from tinsmith.service.responses import rfc3339
from tinsmith.service.tenancy.keys import revoke_key

router = APIRouter()
metrics_router = APIRouter()
"""Not under /api/v1."""


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
    await revoke_key(service.store.database, str(key.id), by=key.owner)
    await service.tenants.reload()
    return Response(status_code=204)


@router.get("/audit")
async def audit(
    tenant: Tenant,
    service: ServiceDep,
    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all",
    day: date | None = None,
) -> dict[str, Any]:
    """What was done on one day in UTC, today if none is given, to what belongs to the owner of the key."""
    found = await service.audit_log.entries(tenant, event_type, day or datetime.now(UTC).date())
    entries = [
        {"timestamp": rfc3339(one["at"]), "event": one["event"], "event_details": one["details"]} for one in found
    ]
    return {"entries": entries}


@router.get("/billing/usage/events")
async def usage_events(
    tenant: Tenant, service: ServiceDep, starting_on: datetime, ending_before: datetime
) -> dict[str, Any]:
    """Tokens trained, read and sampled, checkpoints saved and gigabyte-hours stored, by the hour."""
    return await service.usage.events(tenant, starting_on, ending_before)


@router.get("/billing/usage/checkpoints/current")
async def stored_now(tenant: Tenant, service: ServiceDep, project_id: str | None = None) -> dict[str, Any]:
    """Checkpoints and their bytes of this moment, by project."""
    return service.usage.stored(tenant, project_id)


_OF_PROXIES = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


@metrics_router.get("/metrics")
async def metrics(request: Request, service: ServiceDep) -> Response:
    """Everything that is measured."""
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    given = request.headers.get("x-api-key", bearer)
    if not _is_local(request):
        await admin(service.authenticate(given))
    return Response(content=service.telemetry.scrape(), media_type=CONTENT_TYPE_LATEST)


def _is_local(request: Request) -> bool:
    if request.client is None or any(name in request.headers for name in _OF_PROXIES):
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
