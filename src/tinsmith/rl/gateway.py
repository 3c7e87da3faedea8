"""The policy behind a local endpoint in OpenAI's dialect, for agents that bring a client of their own.

It listens on a free port of this machine, from the first line that is opened to the end of the run, in the run's own
event loop. Each rollout has a line, with an address and a key of its own. What a line answers is in `line.py`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from tinsmith.errors import NotFound, TinsmithError, Unauthorized
from tinsmith.rl.chat import PromptTooLong
from tinsmith.rl.line import MODEL, Line, asked_of, chunks
from tinsmith.rl.policy import SamplingConfig, Snapshot

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

BACKLOG = 1024
"""Connections that may wait to be taken."""


class Gateway:
    """Lines to the policy. Nothing listens before the first is opened."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._url = ""
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def line(self, policy: Snapshot, sampling: SamplingConfig, seed: int) -> AsyncIterator[Line]:
        """Open for as long as the block runs; `seed` is the rollout's own."""
        if self._server is None:
            self._listen()
        name = secrets.token_hex(8)
        line = self._lines[name] = Line(f"{self._url}/{name}/v1", policy, sampling, seed)
        try:
            yield line
        finally:
            del self._lines[name]

    async def close(self) -> None:
        """Stops listening; requests under way are broken off."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
            self._server = self._serving = None

    def _listen(self) -> None:
        import uvicorn

        class Server(uvicorn.Server):
            """Leaves signals to the run."""

            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        place = socket.socket()
        place.bind(("127.0.0.1", 0))
        place.listen(BACKLOG)
        self._url = f"http://127.0.0.1:{place.getsockname()[1]}"
        config = uvicorn.Config(self._app(), log_level="warning", access_log=False, lifespan="off")
        self._server = Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[place]), name="gateway")

    def _app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route("/{line}/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/{line}/v1/models", self._models, methods=["GET"]),
                Route("/{rest:path}", self._nothing, methods=["GET", "POST", "PUT", "DELETE"]),
            ]
        )

    async def _complete(self, request: Request) -> Response:
        from starlette.responses import JSONResponse, Response

        try:
            line = self._of(request)
            asked = asked_of(await request.body())
            reply = await line.complete(asked)
        except TinsmithError as error:
            return JSONResponse(_fault(error), status_code=error.status)
        if not asked.stream:
            return JSONResponse(reply)
        told = chunks(reply, usage=bool(asked.stream_options.get("include_usage")))
        events = [f"data: {json.dumps(one)}\n\n" for one in told]
        return Response("".join(events) + "data: [DONE]\n\n", media_type="text/event-stream")

    async def _models(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        try:
            self._of(request)
        except TinsmithError as error:
            return JSONResponse(_fault(error), status_code=error.status)
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "tinsmith"}]})

    async def _nothing(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        error = NotFound(f"{request.url.path} is not here.", "There are chat/completions and models.")
        return JSONResponse(_fault(error), status_code=error.status)

    def _of(self, request: Request) -> Line:
        """Raises Unauthorized for the wrong key, and for a rollout that is over."""
        line = self._lines.get(request.path_params["line"])
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if line is None or not secrets.compare_digest(given, line.api_key.encode()):
            raise Unauthorized("This key opens no line.", "Use base_url and api_key of a rollout that is under way.")
        return line


def _fault(error: TinsmithError) -> dict[str, Any]:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return {"error": {"message": str(error), "type": kind, "code": code, "param": None}}
