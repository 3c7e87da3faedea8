"""A service behind a port, until a signal ends it.

The port opens at once. `GET /api/v1/healthz` answers 503 until every engine is loaded, then 200; requests that need a
loading engine wait for it. An engine that cannot be loaded at the start ends the server with its error.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.service.app import create_app
from tinsmith.service.config import ServeConfig
from tinsmith.service.deps import Service
from tinsmith.service.engines import Start, start_engine
from tinsmith.service.observe.logs import log_to_console
from tinsmith.service.running import running

log = logging.getLogger(__name__)


DRAIN_S = 3.0
"""For passes and samples that are under way when the server is told to end."""
GRACE_S = 1
"""For answers that are under way after that."""
KEEP_ALIVE_S = 120
"""Longer than clients keep idle connections, so that none is closed just when it is used again."""


class _Server(uvicorn.Server):
    """Ends by itself when it is told to: work under way first, then open polls, then uvicorn."""

    def __init__(self, options: uvicorn.Config, service: Service) -> None:
        super().__init__(options)
        self._service = service
        self._finishing: asyncio.Task[None] | None = None

    def told(self) -> None:
        """A signal. A second one does not wait."""
        if self._finishing is None:
            log.info("Ending: what is under way is finished.")
            self._finishing = asyncio.create_task(self._finish())
        else:
            self.force_exit = True
            self.end()

    def end(self) -> None:
        """Open polls go home, and the port closes."""
        self._service.futures.close()
        self.should_exit = True

    async def _finish(self) -> None:
        if not await self._service.drain.run(DRAIN_S):
            log.info("What is under way takes longer than %.0f s; the next server takes it up.", DRAIN_S)
        self.end()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    config: ServeConfig, *, start: Start = start_engine, on_ready: Callable[[str, str], None] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT. Calls `on_ready(url, key)` when models are ready.

    Raises ConfigError if the port or the folder is taken, and what an engine's start raises.
    """
    log_to_console(config.log_format, config.log_level)
    _many_files()
    asyncio.run(_serve(config, start, on_ready))


async def _serve(config: ServeConfig, start: Start, on_ready: Callable[[str, str], None] | None) -> None:
    listener = _listen(config)
    url = f"http://{config.host}:{listener.getsockname()[1]}"
    loaded: asyncio.Future[TinsmithError | None] = asyncio.get_running_loop().create_future()
    async with running(config, start, loaded.set_result) as service:
        options = uvicorn.Config(
            create_app(service),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
            lifespan="off",
        )
        server = _Server(options, service)

        def tell(outcome: asyncio.Future[TinsmithError | None]) -> None:
            if outcome.cancelled() or outcome.result() is not None:
                server.end()
                return
            log.info("Ready: TINKER_BASE_URL=%s serves %s", url, ", ".join(service.workers))
            if on_ready is not None:
                on_ready(url, service.key or "")

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.told)
        log.info("Loading %s; listening on %s", ", ".join(config.sources()), url)
        loaded.add_done_callback(tell)
        await server.serve(sockets=[listener])
    if loaded.done() and not loaded.cancelled() and (error := loaded.result()) is not None:
        raise error


def _listen(config: ServeConfig) -> socket.socket:
    try:
        listener = socket.create_server((config.host, config.port), backlog=2048)
    except OSError as error:
        why = str(error.strerror).partition(" (while attempting")[0]
        taken = error.errno == errno.EADDRINUSE
        cure = (
            "Give another --port; 0 takes a free one." if taken else "Give a --host of this machine, or another --port."
        )
        raise ConfigError(f"Cannot listen on {config.host}:{config.port}: {why}.", cure) from error
    # asyncio forgets this for sockets it did not make; without it each answer waits 40 ms for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _many_files() -> None:
    """Hundreds of polls are open at once; the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
