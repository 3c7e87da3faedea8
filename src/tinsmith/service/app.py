"""The HTTP app of a running service: its routes, and the only place that turns errors into responses."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tinsmith.chat.request import describe_errors
from tinsmith.errors import Busy, TinsmithError
from tinsmith.service.dependencies import Service
from tinsmith.service.frequent_routes import FrequentRoutes
from tinsmith.service.middleware import RequestMiddleware, route_of
from tinsmith.service.openai import routes as openai
from tinsmith.service.openai.schemas import is_openai_path, openai_error, openai_error_of
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
    return app


async def _tinsmith_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TinsmithError)
    log.info("%s %s refused with %d: %s", request.method, route_of(request.scope), error.status, error)
    headers = {"retry-after-ms": str(error.retry_after_ms)} if isinstance(error, Busy) else None
    if error.status == 401:
        headers = {"WWW-Authenticate": 'ApiKey error="invalid_token"'}  # the SDK exchanges its token for a new one
    if is_openai_path(request.url.path):
        return JSONResponse(openai_error_of(error), error.status, headers)
    return JSONResponse({"detail": str(error), "category": error.category}, error.status, headers)


async def _routing_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path} is not served here: {error.detail}."
    is_openai = is_openai_path(request.url.path)
    body = openai_error(detail, error.status_code, "not_served") if is_openai else {"detail": detail}
    return JSONResponse(body, status_code=error.status_code)


async def _parameter_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"detail": describe_errors(error.errors())}, status_code=400)
