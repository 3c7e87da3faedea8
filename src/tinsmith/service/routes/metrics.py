"""GET /metrics for Prometheus: at the root, as it is scraped by default.

It tells of every tenant, so it is for those who run the server: anyone on this machine, or an admin's key, as
X-API-Key or as a Bearer token. What a proxy passes on comes from this machine and yet from elsewhere: it needs the key.
"""

from __future__ import annotations

import ipaddress

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from tinsmith.service.deps import ServiceDep, admin

router = APIRouter()

_OF_PROXIES = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


@router.get("/metrics")
async def metrics(request: Request, service: ServiceDep) -> Response:
    """Everything that is measured."""
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    given = request.headers.get("x-api-key", bearer)
    if not _is_local(request):
        await admin(service.known(given))
    return Response(content=service.telemetry.text(), media_type=CONTENT_TYPE_LATEST)


def _is_local(request: Request) -> bool:
    if request.client is None or any(name in request.headers for name in _OF_PROXIES):
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
