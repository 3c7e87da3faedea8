"""The HTTP app of a running service: its routes, and what answers their errors."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tinsmith.chat.errors import as_tinsmith_error
from tinsmith.chat.request import describe_errors
from tinsmith.errors import TinsmithError
from tinsmith.service.dependencies import Service
from tinsmith.service.frequent_routes import FrequentRoutes
from tinsmith.service.middleware import RequestMiddleware, route_of
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
from tinsmith.service.wire.errors import error_json, error_response
from tinsmith.service.wire.json_response import SafeJSONResponse

log = logging.getLogger(__name__)


def create_app(service: Service) -> FastAPI:
    """The HTTP API of a running service."""
    app = FastAPI(title="Tinsmith", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    # The routes are matched in this order: the most frequent first.
    frequent = (futures, sampling, training, custom_losses, sessions, health)
    modules = (*frequent, management, checkpoints, imports, admin, operations, base_models)
    for module in modules:
        app.include_router(module.router, prefix="/api/v1")
    app.include_router(admin.metrics_router)
    app.include_router(health.probe_router)
    app.add_middleware(FrequentRoutes, service=service, prefix="/api/v1", on_error=_tinsmith_error)
    app.add_middleware(RequestMiddleware, telemetry=service.telemetry, drain=service.drain)
    for prefix in ("/v1", "/oai/api/v1"):
        app.include_router(openai.router, prefix=prefix)
    app.include_router(openai.generate_router, prefix="/inference/v1")
    app.add_exception_handler(training.AlreadyAccepted, training.promise_again)
    app.add_exception_handler(TinsmithError, _tinsmith_error)
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_exception_handler(RequestValidationError, _parameter_error)
    app.add_exception_handler(Exception, _unforeseen_error)
    return app


async def _tinsmith_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TinsmithError)
    log.info("%s %s refused with %d: %s", request.method, route_of(request.scope), error.status, error)
    return error_response(request.url.path, error)


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path} is not served here: {error.detail}."
    body = error_json(request.url.path, detail, error.status_code, code="not_served")
    return SafeJSONResponse(body, error.status_code)


async def _parameter_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return SafeJSONResponse(error_json(request.url.path, describe_errors(error.errors()), 400), 400)


async def _unforeseen_error(request: Request, error: Exception) -> Response:
    """What fails outside of RequestMiddleware, which answers all else."""
    place = f"{request.method} {route_of(request.scope)}"
    return error_response(request.url.path, as_tinsmith_error(error, place))
