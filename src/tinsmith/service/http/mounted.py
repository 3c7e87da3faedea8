"""Another application under a path of the service, such as its dashboard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

MOUNTED_AT = "tinsmith.mounted_at"
"""Key of a request's scope that names the path whose application answers it."""


class MountedApp:
    """ASGI middleware: requests under `path` go to the application that `build` makes at the first of them, in a
    thread: its imports would delay other requests."""

    def __init__(self, app: ASGIApp, path: str, build: Callable[[], ASGIApp]) -> None:
        self._app, self._path, self._build = app, path, build
        self._mounted: ASGIApp | None = None
        self._building = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: Any = scope.get("path", "")
        if scope["type"] != "http" or not (path == self._path or path.startswith(f"{self._path}/")):
            await self._app(scope, receive, send)
            return
        scope[MOUNTED_AT] = self._path
        if path == self._path:
            await RedirectResponse(f"{path}/", 308)(scope, receive, send)
            return
        async with self._building:
            if self._mounted is None:
                self._mounted = await asyncio.to_thread(self._build)
        root_path = scope.get("root_path", "") + self._path
        await self._mounted({**scope, "root_path": root_path}, receive, send)
