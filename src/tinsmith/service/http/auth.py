"""Whose key a route needs. The functions return the key's record, and raise Unauthorized or Forbidden."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from starlette.requests import Request

from tinsmith.errors import Forbidden
from tinsmith.service.service import Service
from tinsmith.service.tenancy.keys import ApiKey

Authenticate: TypeAlias = Callable[[Service, Request], ApiKey | None]


def no_key(_service: Service, _request: Request) -> None:
    """The route is open, or authenticates its requests itself."""


def api_key(service: Service, request: Request) -> ApiKey:
    """The key in X-API-Key."""
    return service.authenticate(request.headers.get("x-api-key", ""))


def admin_key(service: Service, request: Request) -> ApiKey:
    """The key in X-API-Key, if it is an administrator's."""
    return require_admin(api_key(service, request))


def bearer_key(service: Service, request: Request) -> ApiKey:
    """The key in `Authorization: Bearer tml-…` or X-API-Key, for clients of the OpenAI API."""
    if key := request.headers.get("x-api-key", ""):
        return service.authenticate(key)
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return service.authenticate(key.strip() if scheme.lower() == "bearer" else "", "Authorization: Bearer key")


def require_admin(key: ApiKey) -> ApiKey:
    """The key. Raises Forbidden unless it may read data of all tenants."""
    if not key.admin:
        raise Forbidden(
            f"The key '{key.name}' is not an admin key.", "Use the server's own key, or a key made with --admin."
        )
    return key
