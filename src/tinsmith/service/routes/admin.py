"""The caller's key, audit log and usage, and the metrics of the server.

`metrics_routes` is mounted at the root, where Prometheus scrapes by default. Metrics concern all tenants: they are open
to this machine and to admin keys (X-API-Key or Bearer token). A proxied request comes from this machine on behalf of
another one, so it needs a key.
"""

from __future__ import annotations

import ipaddress
from datetime import UTC, date, datetime
from typing import Literal

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from tinsmith.errors import BadRequest
from tinsmith.service.http.auth import no_key, require_admin
from tinsmith.service.http.endpoint import Call, Json, Routes
from tinsmith.service.http.parameters import Parameters
from tinsmith.service.responses import rfc3339
from tinsmith.service.tenancy.keys import revoke_key

routes = Routes()
metrics_routes = Routes(authenticate=no_key)


@routes.post("/auth/token")
async def auth_token(call: Call[None]) -> Json:
    """Issue a token that replaces the key. It carries its expiry, so clients do not renew it for every request."""
    return {"jwt": call.service.issue_token(call.key)}


@routes.get("/auth/apikey/me")
async def get_key(call: Call[None]) -> Json:
    """The key's record, which `tinker auth login` shows and stores."""
    key = call.key
    return {
        "key_id": key.id,
        "name": key.name,
        "note": "admin" if key.admin else "",
        "details": {"org_details": {"name": key.owner}, "user_details": {"email": key.owner}},
    }


@routes.delete("/auth/apikey/me")
async def delete_key(call: Call[None]) -> Response:
    """Revoke the caller's key and its tokens. The server's own key cannot be revoked."""
    service, key = call.service, call.key
    if key.id == 0:
        raise BadRequest("This key is the server's own.", "Start the server with another --api-key.")
    await revoke_key(service.store.database, str(key.id), by=key.owner)
    await service.tenants.reload()
    return Response(status_code=204)


class AuditParameters(Parameters):
    """audit."""

    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all"
    day: date | None = None


@routes.get("/audit", params=AuditParameters)
async def audit(call: Call[None, AuditParameters]) -> Json:
    """The audit log of one day in UTC (default: today) for the resources of the key's owner."""
    day = call.params.day or datetime.now(UTC).date()
    events = await call.service.audit_log.entries(call.tenant, call.params.event_type, day)
    entries = [
        {"timestamp": rfc3339(event["at"]), "event": event["event"], "event_details": event["details"]}
        for event in events
    ]
    return {"entries": entries}


class UsageParameters(Parameters):
    """billing/usage/events."""

    starting_on: datetime
    ending_before: datetime


@routes.get("/billing/usage/events", params=UsageParameters)
async def usage_events(call: Call[None, UsageParameters]) -> Json:
    """Hourly usage: tokens trained, prefilled and sampled, checkpoints saved, gigabyte-hours stored."""
    return await call.service.usage.events(call.tenant, call.params.starting_on, call.params.ending_before)


class StorageParameters(Parameters):
    """billing/usage/checkpoints/current."""

    project_id: str | None = None


@routes.get("/billing/usage/checkpoints/current", params=StorageParameters)
async def current_storage(call: Call[None, StorageParameters]) -> Json:
    """Current number and bytes of checkpoints by project."""
    return call.service.usage.stored(call.tenant, call.params.project_id)


_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


@metrics_routes.get("/metrics")
async def metrics(call: Call[None]) -> Response:
    """All metrics in Prometheus' text format."""
    request, service = call.http, call.service
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
