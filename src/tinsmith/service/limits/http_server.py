"""uvicorn with limits on connections, in the server process and in front ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from tinsmith.service.limits.connections import KEEP_ALIVE_S, BoundedProtocol, Connections


class BoundedServer(uvicorn.Server):
    """Serves an application until `should_exit`, then finishes open responses for a time. Signals are the caller's."""

    def __init__(self, app: ASGIApp, connections: Connections, grace_s: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(BoundedProtocol, connections=connections),  # type: ignore[arg-type]
                ws="none",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=grace_s,
                timeout_keep_alive=KEEP_ALIVE_S,
                lifespan="off",
            )
        )

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
