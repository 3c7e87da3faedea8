"""The HTTP app over a running service: its routes, and errors turned into answers, here and nowhere else."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tinsmith.errors import Busy, TinsmithError
from tinsmith.service.dependencies import Service
from tinsmith.service.middleware import RequestMiddleware, route_of
from tinsmith.service.openai import completions, generate
from tinsmith.service.openai import routes as openai
from tinsmith.service.openai.schemas import is_theirs, shape_of, shaped
from tinsmith.service.routes import admin, checkpoints, custom_losses, futures, management, sampling, sessions, training
from tinsmith.service.wire.schemas import sentence

log = logging.getLogger(__name__)


def create_app(service: Service) -> FastAPI:
    """The whole API over a running service."""
    app = FastAPI(title="Tinsmith", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    # The busiest first.
    for module in (futures, sampling, training, custom_losses, sessions, management, checkpoints, admin):
        app.include_router(module.router, prefix="/api/v1")
    app.include_router(admin.metrics_router)
    app.add_middleware(RequestMiddleware, telemetry=service.telemetry, drain=service.drain)
    for prefix in ("/v1", "/oai/api/v1"):
        app.include_router(openai.router, prefix=prefix)
        app.include_router(completions.router, prefix=prefix)
    app.include_router(generate.router, prefix="/inference/v1")
    app.add_exception_handler(TinsmithError, _of_ours)
    app.add_exception_handler(HTTPException, _of_routing)
    app.add_exception_handler(RequestValidationError, _of_parameters)
    return app


async def _of_ours(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TinsmithError)
    log.info("%s %s refused with %d: %s", request.method, route_of(request.scope), error.status, error)
    headers = {"retry-after-ms": str(error.retry_after_ms)} if isinstance(error, Busy) else None
    if error.status == 401:
        headers = {"WWW-Authenticate": 'ApiKey error="invalid_token"'}  # exchange it anew
    told = {"detail": str(error), "category": error.category}
    return JSONResponse(shape_of(error) if is_theirs(request.url.path) else told, error.status, headers)


async def _of_routing(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path} is not served here: {error.detail}."
    told = shaped(detail, error.status_code, "not_served") if is_theirs(request.url.path) else {"detail": detail}
    return JSONResponse(told, status_code=error.status_code)


async def _of_parameters(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"detail": sentence(error.errors())}, status_code=400)
