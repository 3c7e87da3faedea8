"""Routes of the service: each declares its body, its parameters and whose key it needs, and one way serves them all.

    routes = Routes()

    @routes.post("/create_session", body=SessionBody)
    async def create_session(call: Call[SessionBody]) -> Json:
        ...

A request is authenticated, its parameters are validated, its body is received and decoded, and the function is called.
An error of Tinsmith is answered in the form of the API that was called; any other is `middleware`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import TypeVar as DefaultTypeVar

from tinsmith.errors import TinsmithError
from tinsmith.service.http.auth import Authenticate, api_key
from tinsmith.service.http.bodies import Body, JsonBody
from tinsmith.service.http.middleware import route_of
from tinsmith.service.http.parameters import Parameters, parse_parameters
from tinsmith.service.service import Service
from tinsmith.service.tenancy.keys import ApiKey
from tinsmith.service.wire.errors import error_response

log = logging.getLogger(__name__)

B = TypeVar("B")
P = DefaultTypeVar("P", default=None)
F = TypeVar("F", bound=Callable[[Any], Awaitable[Any]])
Json: TypeAlias = Mapping[str, Any]
"""A response of JSON, with the status that the route declares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[B, P]):
    """A request to a route: whose it is, its decoded body and its parameters."""

    http: Request
    service: Service
    caller: ApiKey | None
    """None where the route needs no key."""
    params: P
    body: B
    content: bytes
    """The body's bytes."""

    @property
    def key(self) -> ApiKey:
        """The caller's key."""
        assert self.caller is not None, "The route declares that it needs no key."
        return self.caller

    @property
    def tenant(self) -> str:
        """The owner of the caller's key. Only what this tenant owns, or others publish, is reachable."""
        return self.key.owner

    def path(self, name: str) -> str:
        """A part of the path, which the route has as `{name}`."""
        return self.http.path_params[name]


class EarlyResponse(Exception):
    """Ends a route's function with this response."""

    def __init__(self, values: Json) -> None:
        super().__init__(values)
        self.values = values


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What a route declares. `status` is that of its JSON response."""

    path: str
    methods: tuple[str, ...]
    function: Callable[[Call[Any, Any]], Awaitable[Json | Response]]
    authenticate: Authenticate
    body: Body[Any] | None
    params: type[Parameters] | None
    status: int

    async def respond(self, request: Request, service: Service, stack: AsyncExitStack) -> Response:
        """The response to a request. What its body holds is released when `stack` ends."""
        try:
            caller = self.authenticate(service, request)
            params = parse_parameters(self.params, request) if self.params is not None else None
            content, body = b"", None
            if self.body is not None:
                content = await self.body.receive(request, service, caller, stack)
                body = await self.body.decode(request, service, content)
            answer = await self.function(
                Call(http=request, service=service, caller=caller, params=params, body=body, content=content)
            )
        except EarlyResponse as early:
            answer = early.values
        except TinsmithError as error:
            log.info("%s %s refused with %d: %s", request.method, route_of(request.scope), error.status, error)
            return error_response(request.url.path, error)
        return answer if isinstance(answer, Response) else json_response(answer, self.status)


def json_response(values: Json, status: int = 200) -> Response:
    """A response of JSON."""
    return Response(to_json(values), status, media_type="application/json")


class MountedEndpoint:
    """ASGI application of an endpoint of a running service."""

    def __init__(self, endpoint: Endpoint, service: Service) -> None:
        self.endpoint, self._service = endpoint, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            response = await self.endpoint.respond(Request(scope, receive), self._service, stack)
            await response(scope, receive, send)


class Routes:
    """Routes with a common prefix; `authenticate` is for those that declare no other."""

    def __init__(self, prefix: str = "", authenticate: Authenticate = api_key) -> None:
        self.endpoints: list[Endpoint] = []
        self._prefix, self._authenticate = prefix, authenticate

    def get(self, path: str, **declared: Any) -> Callable[[F], F]:
        """Declare the function a GET route; the keywords are those of `route`."""
        return self.route(("GET",), path, **declared)

    def put(self, path: str, **declared: Any) -> Callable[[F], F]:
        """Declare the function a PUT route."""
        return self.route(("PUT",), path, **declared)

    def post(self, path: str, **declared: Any) -> Callable[[F], F]:
        """Declare the function a POST route."""
        return self.route(("POST",), path, **declared)

    def delete(self, path: str, **declared: Any) -> Callable[[F], F]:
        """Declare the function a DELETE route."""
        return self.route(("DELETE",), path, **declared)

    def route(
        self,
        methods: tuple[str, ...],
        path: str,
        *,
        body: Body[Any] | type[BaseModel] | None = None,
        params: type[Parameters] | None = None,
        auth: Authenticate | None = None,
        status: int = 200,
    ) -> Callable[[F], F]:
        """Declare the function a route. A pydantic class as `body` stands for a small JSON body of this class."""

        def declare(function: F) -> F:
            self.endpoints.append(
                Endpoint(
                    path=self._prefix + path,
                    methods=methods,
                    function=function,
                    authenticate=auth or self._authenticate,
                    body=JsonBody(body) if isinstance(body, type) else body,
                    params=params,
                    status=status,
                )
            )
            return function

        return declare


def mount(prefix: str, endpoint: Endpoint, service: Service) -> Route:
    """The endpoint of a running service under `prefix`."""
    route = Route(prefix + endpoint.path, MountedEndpoint(endpoint, service), methods=endpoint.methods)
    route.methods = set(endpoint.methods)  # without HEAD, which Starlette adds to GET
    return route


class PathTable:
    """ASGI middleware that finds routes without variable parts in a table: the router goes through all patterns."""

    def __init__(self, app: ASGIApp, routes: Iterable[Route]) -> None:
        self._app = app
        self._endpoints: dict[tuple[str, str], ASGIApp] = {
            (method, route.path): route.endpoint
            for route in routes
            for method in route.methods or ()
            if not route.param_convertors
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        scope["endpoint"], scope["path_params"] = endpoint, {}
        await endpoint(scope, receive, send)
