"""The HTTP app of a running service: its routes, and what answers the errors outside of them."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tinsmith.chat.errors import as_tinsmith_error
from tinsmith.service.http.endpoint import Endpoint, PathTable, mount
from tinsmith.service.http.middleware import RequestMiddleware, route_of
from tinsmith.service.http.mounted import MountedApp
from tinsmith.service.openai import routes as openai
from tinsmith.service.routes import (
    admin,
    base_models,
    checkpoints,
    custom_losses,
    futures,
    health,
    imports,
    management,
    operations,
    sampling,
    sessions,
    training,
)
from tinsmith.service.service import Service
from tinsmith.service.wire.errors import error_json, error_response
from tinsmith.service.wire.json_response import SafeJSONResponse

DASHBOARD_PATH = "/dashboard"

_TINKER = (
    *(futures, sampling, training, custom_losses, sessions, health),
    *(management, checkpoints, imports, admin, operations, base_models),
)


def endpoints() -> list[tuple[str, Endpoint]]:
    """The routes of the service, each with the prefix that it is mounted under."""
    tables = [
        *(("/api/v1", module.routes) for module in _TINKER),
        *(("", routes) for routes in (admin.metrics_routes, health.probe_routes)),
        *((prefix, openai.routes) for prefix in ("/v1", "/oai/api/v1")),
        ("/inference/v1", openai.generate_routes),
    ]
    return [(prefix, endpoint) for prefix, routes in tables for endpoint in routes.endpoints]


Dashboard = Callable[[Service, ASGIApp], ASGIApp]
"""Makes the pages about a service, which read its API by calling the application of the API."""


def create_app(service: Service, dashboard: Dashboard | None = None) -> Starlette:
    """The HTTP API of a running service, with its dashboard under DASHBOARD_PATH."""
    routes = [mount(prefix, endpoint, service) for prefix, endpoint in endpoints()]
    pages = [Middleware(MountedApp, path=DASHBOARD_PATH, build=lambda: dashboard(service, app))] if dashboard else []
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(RequestMiddleware, telemetry=service.telemetry, drain=service.drain),
            *pages,
            Middleware(PathTable, routes=routes),
        ],
        exception_handlers={HTTPException: _routing_error, Exception: _unforeseen_error},
    )
    return app


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path} is not served here: {error.detail}."
    body = error_json(request.url.path, detail, error.status_code, code="not_served")
    return SafeJSONResponse(body, error.status_code)


async def _unforeseen_error(request: Request, error: Exception) -> Response:
    """What fails outside of RequestMiddleware, which answers all else."""
    place = f"{request.method} {route_of(request.scope)}"
    return error_response(request.url.path, as_tinsmith_error(error, place))
