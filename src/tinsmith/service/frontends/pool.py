"""The front ends of a running service, as its core sees them: their processes, their requests, their connections.

All of them accept connections from one listening socket, which the core holds: while a front end is started again, the
others accept, and what nobody has accepted yet waits. The core reads no HTTP itself. A front end that ends takes the
connections of its clients along; they send their requests again, as after any lost response. Front ends end with the
core, whose end closes their sockets.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp

from tinsmith.service.frontends.calls import ForwardedCall
from tinsmith.service.frontends.channel import Channel, connect
from tinsmith.service.frontends.messages import (
    BodyPart,
    ClientGone,
    ConnectionClosed,
    ConnectionOpened,
    ForwardedRequest,
    FrontendSettings,
    PartWritten,
    RefuseConnection,
    Stop,
)
from tinsmith.service.limits.connections import AddressCounts

log = logging.getLogger(__name__)

SILENCE_S = 60.0
"""Time after which a front end that sends nothing, not even that it is alive, is killed."""
MAX_RESTART_S = 5.0
"""Longest pause before a front end that ends again and again is started."""
STEADY_S = 10.0
"""Life of a front end after which the next one is started without a pause."""


class Frontend:
    """One front end: its process, and the requests and connections that it has."""

    def __init__(self, app: ASGIApp, counts: AddressCounts) -> None:
        self._app, self._counts = app, counts
        self._calls: dict[int, ForwardedCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[tuple[Frontend, int]] = set()
        self._ended = asyncio.Event()
        self._channel = Channel(self._receive, self._end)
        self._last_message_s = asyncio.get_running_loop().time()
        self._process: asyncio.subprocess.Process | None = None
        self._receivers: dict[type, Callable[[Any], None]] = {
            ForwardedRequest: self._begin,
            BodyPart: lambda part: self._with_call(part.number, lambda call: call.add_part(part)),
            PartWritten: lambda message: self._with_call(message.number, ForwardedCall.note_written),
            ClientGone: lambda message: self._with_call(message.number, ForwardedCall.disconnect),
            ConnectionOpened: self._count,
            ConnectionClosed: lambda message: self._discount((self, message.number)),
        }

    @property
    def pid(self) -> int | None:
        """Its process id, once it runs."""
        return self._process.pid if self._process is not None else None

    async def run(self, listener: socket.socket, settings: FrontendSettings) -> int:
        """Start the process and serve its requests until it ends. Returns its exit code."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "tinsmith.service.frontends.process"),
                *(str(listener.fileno()), str(theirs.fileno()), json.dumps(settings)),
                pass_fds=(listener.fileno(), theirs.fileno()),
                start_new_session=True,  # Ctrl-C interrupts only the core, which stops its front ends
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
            )
        watch = asyncio.create_task(self._watch())
        try:
            await connect(self._channel, ours)
            await self._ended.wait()
        finally:
            watch.cancel()
            self._channel.close()
            self._kill()  # one that has closed its socket serves nobody
            code = await self._process.wait()
        return code

    def stop(self) -> None:
        """Let it end once the open responses have ended."""
        self._channel.send(Stop())

    async def finish(self, within_s: float) -> None:
        """Wait for the running requests; those that take longer are cancelled."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def end(self, within_s: float) -> None:
        """Wait for its end; it is killed if it takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def _receive(self, message: Any) -> None:
        self._last_message_s = asyncio.get_running_loop().time()
        receive = self._receivers.get(type(message))
        if receive is not None:
            receive(message)

    def _begin(self, request: ForwardedRequest) -> None:
        call = self._calls[request.number] = ForwardedCall(request, self._channel.send)
        task = asyncio.create_task(call.run(self._app))
        self._tasks.add(task)

        def forget(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            self._calls.pop(request.number, None)

        task.add_done_callback(forget)

    def _with_call(self, number: int, act: Callable[[ForwardedCall], None]) -> None:
        call = self._calls.get(number)
        if call is not None:
            act(call)

    def _count(self, opened: ConnectionOpened) -> None:
        connection = (self, opened.number)
        self._connections.add(connection)
        refusal = self._counts.add(connection, opened.address)
        if refusal is not None:
            self._channel.send(RefuseConnection(opened.number, refusal.status, refusal.detail))

    def _discount(self, connection: tuple[Frontend, int]) -> None:
        self._connections.discard(connection)
        self._counts.discard(connection)

    def _end(self) -> None:
        for call in self._calls.values():
            call.disconnect()
        for connection in list(self._connections):
            self._discount(connection)
        self._ended.set()

    async def _watch(self) -> None:
        """Kill the process when it has been silent for SILENCE_S."""
        while True:
            await asyncio.sleep(SILENCE_S / 4)
            if asyncio.get_running_loop().time() - self._last_message_s > SILENCE_S:
                log.warning("Front end %d has been silent for %.0f s; it is killed.", self.pid, SILENCE_S)
                self._kill()


class FrontendPool:
    """`count` front ends, each of which is started again when it ends."""

    def __init__(self, app: ASGIApp, counts: AddressCounts, count: int, settings: FrontendSettings) -> None:
        self._app, self._counts, self._count, self._settings = app, counts, count, settings
        self._running: set[Frontend] = set()
        self._stopped = asyncio.Event()
        self._grace_s = 0.0

    @property
    def pids(self) -> list[int]:
        """Process ids of the front ends that run."""
        return [frontend.pid for frontend in self._running if frontend.pid is not None]

    async def serve(self, listener: socket.socket, grace_s: float) -> None:
        """Serve until `stop`; then open responses have `grace_s` seconds."""
        self._grace_s = grace_s
        async with asyncio.TaskGroup() as keepers:
            for _ in range(self._count):
                keepers.create_task(self._keep(listener))
            await self._stopped.wait()
            listener.close()
            running = list(self._running)
            for frontend in running:
                frontend.stop()
            await asyncio.gather(*(frontend.finish(self._grace_s) for frontend in running))
            await asyncio.gather(*(frontend.end(self._grace_s + 1) for frontend in running))

    def stop(self, *, force: bool = False) -> None:
        """End; with `force`, without waiting for open responses."""
        self._grace_s = 0.0 if force else self._grace_s
        self._stopped.set()

    async def _keep(self, listener: socket.socket) -> None:
        """Keep one front end running until the pool stops."""
        loop, pause_s = asyncio.get_running_loop(), 0.0
        while not self._stopped.is_set():
            frontend, began = Frontend(self._app, self._counts), loop.time()
            self._running.add(frontend)
            try:
                code = await frontend.run(listener, self._settings)
            except OSError as error:  # no process, memory or file is left for it
                code = error.errno
            finally:
                self._running.discard(frontend)
            if self._stopped.is_set():
                return
            pause_s = 0.0 if loop.time() - began > STEADY_S else min(max(0.1, 2 * pause_s), MAX_RESTART_S)
            log.warning("Front end %s ended with code %d; it is started again.", frontend.pid, code)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopped.wait()
