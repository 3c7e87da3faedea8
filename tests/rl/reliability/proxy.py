"""A proxy between a run and its server, in a thread of the test. It reports each request before the server has it, and
after the server has answered it; the test may hold a request, refuse it, or drop it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import httpx
import uvicorn

Phase = Literal["before", "after"]
Action = Literal["pass", "hold", "refuse"]
Hook = Callable[[Phase, str], Action]
_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}


class Proxy:
    """Forwards requests to `target`. `hook(phase, name)` says what becomes of each; `name` is the last part of its
    path. A held request is never answered."""

    def __init__(self, target: str, hook: Hook) -> None:
        self.target, self.hook, self.url = target, hook, ""
        self._client: httpx.AsyncClient | None = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        name = scope["path"].rpartition("/")[2]
        if await self._act("before", name, send):
            return
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        headers = [(key, value) for key, value in scope["headers"] if key.decode() not in _HOP]
        url = f"{self.target}{scope['path']}?{scope['query_string'].decode()}".rstrip("?")
        try:
            async with self._client.stream(scope["method"], url, headers=headers, content=body) as response:
                content = b"".join([part async for part in response.aiter_raw()])
        except httpx.HTTPError:
            await _answer(send, 503, [], b"")
            return
        if not await self._act("after", name, send):
            own = [(key.lower(), value) for key, value in response.headers.raw if key.lower().decode() not in _HOP]
            await _answer(send, response.status_code, own, content)

    async def _act(self, phase: Phase, name: str, send: Any) -> bool:
        action = self.hook(phase, name)
        if action == "hold":
            await asyncio.Event().wait()
        if action == "refuse":
            await _answer(send, 503, [], b"")
        return action != "pass"


async def _answer(send: Any, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


@contextmanager
def proxied(target: str, hook: Hook) -> Iterator[Proxy]:
    """Run a proxy for the duration of a block."""
    proxy = Proxy(target, hook)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            proxy, log_level="critical", access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            server.should_exit = True
            thread.join(10)
