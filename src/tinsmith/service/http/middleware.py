"""Middleware of every HTTP request: timing, log context, the last answer to errors, and 503 while the server drains.

The 503 carries retry-after, so that the SDK and other clients retry until they reach the next server.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinsmith.chat.errors import ENDINGS, as_tinsmith_error
from tinsmith.service.drain import Drain
from tinsmith.service.http.mounted import MOUNTED_AT
from tinsmith.service.observability.logs import HttpLogContext
from tinsmith.service.observability.metrics import Telemetry
from tinsmith.service.wire.errors import error_json, error_response

SERVED_WHILE_DRAINING = (
    "retrieve_future",
    "retrieve_futures",
    "session_heartbeat",
    "cancel_future",
    "finish",
    "config",
    "dynamic_config",
    "telemetry",
    "get_info",
)
"""Last segments of paths that start no new work: they fetch results, keep sessions alive or end them."""

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class RequestMiddleware:
    """ASGI middleware: measures and logs requests, refuses new work while draining, answers unforeseen errors."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry, drain: Drain) -> None:
        self._app = app
        self._telemetry = telemetry
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status, has_started = time.perf_counter(), 500, False

        async def record_status(message: Message) -> None:
            nonlocal status, has_started
            if message["type"] == "http.response.start":
                status, has_started = message["status"], True
            await send(message)

        app = _refuse if self._drain.started and _is_new_work(scope) else self._app
        try:
            with HttpLogContext():
                await app(scope, receive, record_status)
        except asyncio.CancelledError:
            if not self._drain.started:
                raise
            if not has_started:  # the server ends requests that outlast the drain
                await _refuse(scope, receive, record_status)
        except ENDINGS:
            raise
        except BaseException as error:  # noqa: BLE001 - the last that sees it: uvicorn would answer in plain text
            failure = as_tinsmith_error(error, f"{_method_of(scope)} {route_of(scope)}")
            if not has_started:  # uvicorn closes the connection of a response that is not complete
                await error_response(scope["path"], failure)(scope, receive, record_status)
        finally:
            self._telemetry.http_finished(_method_of(scope), route_of(scope), status, time.perf_counter() - start)


def route_of(scope: Scope) -> str:
    """The route's pattern, as its module declares it. The path is never logged: it may hold ids, and signatures that
    open files."""
    if MOUNTED_AT in scope:
        return scope[MOUNTED_AT]
    mounted: Any = scope.get("endpoint")
    return mounted.endpoint.path if mounted is not None else "(none)"


def _method_of(scope: Scope) -> str:
    """The method as a metric label; unknown methods share one, so clients cannot create labels."""
    return scope["method"] if scope["method"] in METHODS else "(other)"


def _is_new_work(scope: Scope) -> bool:
    last = scope["path"].rstrip("/").rpartition("/")[2]
    return scope["method"] == "POST" and last not in SERVED_WHILE_DRAINING


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    message = "This server is shutting down and accepts no new work. Retry."
    body = error_json(scope["path"], message, 503, category="server")
    await JSONResponse(body, status_code=503, headers={"retry-after": "1"})(scope, receive, send)
