"""The port of a running service: HTTP on it until a signal, then the shutdown in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from tinsmith.service.limits.connections import KEEP_ALIVE_S, BoundedProtocol, Connections
from tinsmith.service.observability.systemd import STOPPING, Notifier
from tinsmith.service.service import Service

log = logging.getLogger(__name__)

DRAIN_S = 3.0
"""Time for running batches and samples after a signal."""
GRACE_S = 1
"""Time for open responses after the drain."""


class HttpServer(uvicorn.Server):
    """uvicorn with limits on connections. Signals are the caller's."""

    def __init__(self, app: ASGIApp, connections: Connections) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(BoundedProtocol, connections=connections),  # type: ignore[arg-type]
                ws="none",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=GRACE_S,
                timeout_keep_alive=KEEP_ALIVE_S,
                lifespan="off",
            )
        )

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self, *, force: bool = False) -> None:
        """End, after GRACE_S for open responses; with `force`, at once."""
        self.force_exit = self.force_exit or force
        self.should_exit = True


class Shutdown:
    """Stops in order: running work first, then open polls, then HTTP."""

    def __init__(self, service: Service, server: HttpServer, systemd: Notifier) -> None:
        self._service, self._server, self._systemd = service, server, systemd
        self._draining: asyncio.Task[None] | None = None

    def on_signal(self) -> None:
        """Stop after running work; a second signal stops at once."""
        if self._draining is None:
            log.info("Stopping: finishing what is running.")
            self._systemd.send(STOPPING)
            self._draining = asyncio.create_task(self._drain())
        else:
            self.stop(force=True)

    def stop(self, *, force: bool = False) -> None:
        """Answer open polls and close the port."""
        self._service.futures.wake_waiters()
        self._server.stop(force=force)

    async def _drain(self) -> None:
        if not await self._service.drain.run(DRAIN_S):
            log.info("Running work takes longer than %.0f s; the next server continues it.", DRAIN_S)
        self.stop()
