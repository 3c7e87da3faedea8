"""The port of a running service: HTTP in this process, or in front ends before it, until a signal.

With `frontends: 0` this process serves HTTP itself. Otherwise front ends do (`service.frontends`), and the same
application answers the requests that they forward.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Protocol

from starlette.types import ASGIApp
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.service.config import ServeConfig
from tinsmith.service.dependencies import Service
from tinsmith.service.frontends.messages import FrontendSettings
from tinsmith.service.frontends.pool import FrontendPool
from tinsmith.service.limits.connections import Connections
from tinsmith.service.limits.http_server import BoundedServer
from tinsmith.service.observability.systemd import STOPPING, Notifier

log = logging.getLogger(__name__)

DRAIN_S = 3.0
"""Time for running batches and samples after a signal."""
GRACE_S = 1
"""Time for open responses after the drain."""
PORT_FREE_S = 5.0
"""Time in which the front ends of a killed server end, and with them the use of its port."""


class HttpServer(Protocol):
    """What answers HTTP on a listening socket."""

    async def serve(self, listener: socket.socket) -> None:
        """Serve until `stop`, then finish open responses for GRACE_S at most."""
        ...

    def stop(self, *, force: bool = False) -> None:
        """End; with `force`, without waiting for open responses."""
        ...


def http_server(app: ASGIApp, service: Service) -> HttpServer:
    """The server that the settings ask for."""
    config = service.config
    if not config.frontends:
        return _OwnServer(app, Connections(service.connections, config.request_timeout_s), GRACE_S)
    settings = FrontendSettings(config.request_timeout_s, config.log_format, config.log_level)
    return _Frontends(FrontendPool(app, service.connections, config.frontends, settings))


class _OwnServer(BoundedServer):
    """HTTP in this process."""

    @override
    async def serve(self, listener: socket.socket) -> None:  # type: ignore[override]
        await super().serve(sockets=[listener])

    def stop(self, *, force: bool = False) -> None:
        self.force_exit = self.force_exit or force
        self.should_exit = True


class _Frontends:
    """HTTP in front ends."""

    def __init__(self, pool: FrontendPool) -> None:
        self._pool = pool

    async def serve(self, listener: socket.socket) -> None:
        await self._pool.serve(listener, GRACE_S)

    def stop(self, *, force: bool = False) -> None:
        self._pool.stop(force=force)


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


async def listen(config: ServeConfig) -> socket.socket:
    """The listening socket. Raises ConfigError if the port is in use or the host is not this machine's."""
    make: Callable[[], socket.socket] = partial(socket.create_server, (config.host, config.port), backlog=2048)
    deadline = asyncio.get_running_loop().time() + (PORT_FREE_S if config.frontends else 0.0)
    while True:
        try:
            listener = make()
            break
        except OSError as error:
            if error.errno == errno.EADDRINUSE and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.1)
                continue
            reason = str(error.strerror).partition(" (while attempting")[0]
            raise ConfigError(
                f"Cannot listen on {config.host}:{config.port}: {reason}.",
                "Give another --port; 0 takes a free one."
                if error.errno == errno.EADDRINUSE
                else "Give a --host of this machine, or another --port.",
            ) from error
    # asyncio sets this only for sockets it makes; without it each response waits 40 ms for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
