"""The caller's key, audit log and usage, and the metrics of the server.

`metrics_router` is mounted at the root, where Prometheus scrapes by default. Metrics concern all tenants: they are open
to this machine and to admin keys (X-API-Key or Bearer token). A proxied request comes from this machine on behalf of
another one, so it needs a key.
"""

from __future__ import annotations

import ipaddress
from datetime import UTC, date, datetime
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from tinsmith.errors import BadRequest
from tinsmith.service.dependencies import CallerKey, ServiceDep, Tenant, require_admin
from tinsmith.service.responses import rfc3339
from tinsmith.service.tenancy.keys import revoke_key

router = APIRouter()
metrics_router = APIRouter()


@router.post("/auth/token")
async def auth_token(key: CallerKey, service: ServiceDep) -> dict[str, str]:
    """Issue a token that replaces the key. It carries its expiry, so clients do not renew it for every request."""
    return {"jwt": service.issue_token(key)}


@router.get("/auth/apikey/me")
async def get_key(key: CallerKey) -> dict[str, Any]:
    """The key's record, which `tinker auth login` shows and stores."""
    return {
        "key_id": key.id,
        "name": key.name,
        "note": "admin" if key.admin else "",
        "details": {"org_details": {"name": key.owner}, "user_details": {"email": key.owner}},
    }


@router.delete("/auth/apikey/me")
async def delete_key(key: CallerKey, service: ServiceDep) -> Response:
    """Revoke the caller's key and its tokens. The server's own key cannot be revoked."""
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
    """The audit log of one day in UTC (default: today) for the resources of the key's owner."""
    events = await service.audit_log.entries(tenant, event_type, day or datetime.now(UTC).date())
    entries = [
        {"timestamp": rfc3339(event["at"]), "event": event["event"], "event_details": event["details"]}
        for event in events
    ]
    return {"entries": entries}


@router.get("/billing/usage/events")
async def usage_events(
    tenant: Tenant, service: ServiceDep, starting_on: datetime, ending_before: datetime
) -> dict[str, Any]:
    """Hourly usage: tokens trained, prefilled and sampled, checkpoints saved, gigabyte-hours stored."""
    return await service.usage.events(tenant, starting_on, ending_before)


@router.get("/billing/usage/checkpoints/current")
async def current_storage(tenant: Tenant, service: ServiceDep, project_id: str | None = None) -> dict[str, Any]:
    """Current number and bytes of checkpoints by project."""
    return service.usage.stored(tenant, project_id)


_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


@metrics_router.get("/metrics")
async def metrics(request: Request, service: ServiceDep) -> Response:
    """All metrics in Prometheus' text format."""
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not _is_local(request):
        require_admin(service.authenticate(request.headers.get("x-api-key", bearer)))
    return Response(content=service.telemetry.scrape(), media_type=CONTENT_TYPE_LATEST)


def _is_local(request: Request) -> bool:
    if request.client is None or any(name in request.headers for name in _PROXY_HEADERS):
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
