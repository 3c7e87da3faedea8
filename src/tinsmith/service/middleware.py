"""Around every HTTP request: it is timed, its log lines know it, and while the server ends, new work is refused.

A refusal is 503 with retry-after, which the SDK and others' clients take as "ask again": they find the next server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinsmith.service.observability.logs import http_log_context
from tinsmith.service.observability.metrics import Telemetry
from tinsmith.service.sampling import Sampling
from tinsmith.service.training.worker import Worker

ANSWERED_TO_THE_END = (
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
"""Last parts of paths: what fetches results, keeps sessions or ends them is no new work."""

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class Drain:
    """The end of a service's work: nothing new begins, what is under way is finished and written."""

    def __init__(self, workers: Iterable[Worker], sampling: Sampling) -> None:
        self._workers = list({id(worker): worker for worker in workers}.values())
        self._sampling = sampling
        self.begun = False

    async def run(self, within_s: float) -> bool:
        """Whether all that was under way ended in time. What did not is promised still: the next server takes it up."""
        self.begun = True
        waits = [*(worker.drain() for worker in self._workers), self._sampling.drain()]
        try:
            async with asyncio.timeout(within_s):
                await asyncio.gather(*waits)
        except TimeoutError:
            return False
        return True


class RequestMiddleware:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry, drain: Drain) -> None:
        self._app = app
        self._telemetry = telemetry
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        app = _ending if self._drain.begun and _is_new_work(scope) else self._app
        try:
            with http_log_context():
                await app(scope, receive, sent)
        finally:
            self._telemetry.http_finished(_method_of(scope), route_of(scope), status, time.perf_counter() - began)


def route_of(scope: Scope) -> str:
    """The route's pattern, never the path: that may hold ids, and signatures that open files."""
    route: Any = scope.get("route")
    return route.path if route is not None else "(none)"


def _method_of(scope: Scope) -> str:
    """One of a few: whoever makes up others makes no more to count."""
    return scope["method"] if scope["method"] in METHODS else "(other)"


def _is_new_work(scope: Scope) -> bool:
    last = scope["path"].rstrip("/").rpartition("/")[2]
    return scope["method"] == "POST" and last not in ANSWERED_TO_THE_END


async def _ending(scope: Scope, receive: Receive, send: Send) -> None:
    detail = {"detail": "This server is ending and takes nothing new. Ask again.", "category": "server"}
    await JSONResponse(detail, status_code=503, headers={"retry-after": "1"})(scope, receive, send)
