"""The four most frequent requests, answered before FastAPI's middleware, router and resolution of parameters.

Those take longer than the rest of such a request. FastAPI's own routes, which document these requests, call the same
functions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tinsmith.errors import TinsmithError
from tinsmith.service.dependencies import Service, get_tenant, pass_body, read_small_body
from tinsmith.service.routes import futures, sampling, training
from tinsmith.service.wire.schemas import StepBody

Endpoint = Callable[[Request, Service, str], Awaitable[Response]]

_STEP = training.NewRequestOf(StepBody)


class FrequentRoutes:
    """ASGI middleware: answers the frequent requests, and passes on all others.

    `on_error` makes the response to an error of the service.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        prefix: str,
        on_error: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._app, self._service, self._on_error = app, service, on_error
        endpoints = {
            "/retrieve_future": _retrieve_future,
            "/asample": _asample,
            "/optim_step": _optim_step,
            "/forward_backward": _forward_backward,
        }
        self._routes: dict[str, tuple[Endpoint, Route]] = {
            # RequestMiddleware names a request by its route's path, which FastAPI's leave the prefix out of.
            prefix + path: (endpoint, Route(path, endpoint))
            for path, endpoint in endpoints.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        if not is_post or scope["path"] not in self._routes:
            await self._app(scope, receive, send)
            return
        endpoint, scope["route"] = self._routes[scope["path"]]
        request = Request(scope, receive)
        try:
            key = self._service.authenticate(request.headers.get("x-api-key", ""))
            response = await endpoint(request, self._service, await get_tenant(key))
        except training.AlreadyAccepted as error:
            response = await training.promise_again(request, error)
        except TinsmithError as error:
            response = await self._on_error(request, error)
        await response(scope, receive, send)


async def _retrieve_future(request: Request, service: Service, tenant: str) -> Response:
    return await futures.retrieve_future(tenant, service, await read_small_body(request))


async def _asample(request: Request, service: Service, tenant: str) -> Response:
    async with await service.read_prompt(request, tenant) as body:
        return _json(await sampling.asample(request, tenant, service, body))


async def _optim_step(request: Request, service: Service, tenant: str) -> Response:
    new = await _STEP(tenant, service, await read_small_body(request))
    return _json(await training.optim_step(new))


async def _forward_backward(request: Request, service: Service, tenant: str) -> Response:
    async with pass_body(request, tenant, service) as body:
        return _json(await training.forward_backward(request, tenant, service, body))


def _json(values: dict[str, Any]) -> Response:
    return Response(to_json(values), media_type="application/json")
