"""An engine in a process of its own, as its parent, or the service of a cluster, sees it.

Each method of RemoteEngine sends one message over a socket and receives one reply, matched by number; if a sample has
`on_delta`, its deltas come before the reply, under the same number. Heartbeats come in between.

If the child dies, every call fails with EngineDied and `died` is set. Starting another engine is up to the caller, and
so is `kill` for a child that `stalled` reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinsmith.engine.base import (
    AdamParams,
    LoraSpec,
    ModelCard,
    OnDelta,
    Pass,
    PassResult,
    SampleRequest,
    SampleResult,
    SequenceDelta,
)
from tinsmith.engine.child_process import CHILD_ENVIRONMENT, ChildProcess, EngineProcess
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.liveness import (
    LOAD_TIMEOUT_S,
    SILENCE_S,
    SILENCE_SHARE,
    Heartbeat,
    ProcessEnd,
    Pulse,
    Stall,
    process_end,
)
from tinsmith.engine.process import LENGTH_PREFIX, encode
from tinsmith.errors import EngineDied, TinsmithError

log = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 24
"""Bytes of a process's messages that are read ahead."""
CLOSE_TIMEOUT_S = 1.0
"""Time for a child to exit. It has nothing to finish: files are written to a temporary name first."""
EXIT_TIMEOUT_S = 2.0
"""Time for the exit status of a child whose connection has closed."""

_BROKEN = (ConnectionError, ssl.SSLError)  # of a connection that has ended; SSLError: data arrives while TLS closes
_RETRY = "It is being restarted: try again later."


class EngineCalls:
    """The methods of `engine.interface.Engine` but `close`, each as a call of the same method elsewhere."""

    async def call(self, method: str, *args: Any, on_delta: OnDelta | None = None, **options: Any) -> Any:
        """Call a method of an engine; `on_delta` receives the tokens of a sample."""
        raise NotImplementedError

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        await self.call("create", model_id, lora)

    async def fork(self, model_id: str, source: str | Path, *, optimizer: bool) -> int:
        return await self.call("fork", model_id, source, optimizer=optimizer)

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        return await self.call("run", list(passes))

    async def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        return await self.call("step", model_id, adam)

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        return await self.call("save", model_id, to, optimizer=optimizer)

    async def load(self, model_id: str, source: Path, *, optimizer: bool) -> None:
        await self.call("load", model_id, source, optimizer=optimizer)

    async def drop(self, model_id: str) -> None:
        await self.call("drop", model_id)

    async def capture(self, model_id: str, version: str) -> None:
        await self.call("capture", model_id, version)

    async def persist(self, version: str, to: Path) -> int:
        return await self.call("persist", version, to)

    async def attach(self, version: str, source: Path) -> None:
        await self.call("attach", version, source)

    async def detach(self, version: str) -> None:
        await self.call("detach", version)

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        return await self.call("sample", request, on_delta=on_delta)

    async def cancel(self, request_id: str) -> None:
        await self.call("cancel", request_id)

    async def release_memory(self) -> None:
        await self.call("release_memory")


class RemoteEngine(EngineCalls):
    """Implements `engine.interface.Engine` for an engine in a child process; create it with `start`."""

    def __init__(
        self,
        card: ModelCard,
        child: EngineProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pulse: Pulse,
    ) -> None:
        self.card = card
        self.died = asyncio.Event()
        self.pulse = pulse
        self.end: ProcessEnd | None = None
        """Why the child ended."""
        self._child, self._reader, self._writer = child, reader, writer
        self._numbers = itertools.count()
        self._calls: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        """Method and reply of each call without a reply, by number."""
        self._listeners: dict[int, OnDelta] = {}
        self._listener = asyncio.create_task(self._listen())
        self._pings: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: EngineConfig) -> RemoteEngine:
        """Start a child and wait until its model is loaded.

        Raises the error that loading raised in the child, or EngineDied if the child ended or stalled.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tinsmith.engine.process", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=CHILD_ENVIRONMENT | os.environ,
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=BUFFER_BYTES)
        return await cls.over(ChildProcess(child), reader, writer, config, config.source)

    @classmethod
    async def over(
        cls,
        child: EngineProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        config: Any,
        source: str,
        *,
        ping_s: float = 0.0,
    ) -> RemoteEngine:
        """Send a process the settings of its engine and wait until its model is loaded. Errors are those of `start`.

        `ping_s`: time between pings, for a process that ends itself when it hears nothing; 0 sends none.
        """
        pulse = Pulse()
        try:
            await _send(writer, config)
            card = await _card(reader, pulse)
        except (asyncio.IncompleteReadError, OSError):
            end = await _end_of(child, pulse)
            card = EngineDied(f"The engine for {source} ended during loading ({end.text}).")
        except BaseException:
            child.kill()
            writer.close()
            raise
        if isinstance(card, Exception):
            if isinstance(card, EngineDied):
                child.kill()
            await _close(writer)
            await child.died.wait()
            raise card
        engine = cls(card, child, reader, writer, pulse)
        if ping_s:
            engine.start_pings(ping_s)
        return engine

    def start_pings(self, interval_s: float) -> None:
        """Send a ping every `interval_s` from now on."""

        async def ping() -> None:
            with contextlib.suppress(*_BROKEN):
                while not self.died.is_set():
                    await _send(self._writer, Heartbeat(0))
                    await asyncio.sleep(interval_s)

        self._pings = asyncio.create_task(ping())

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    @property
    def progress(self) -> int:
        return self.pulse.progress

    def running(self) -> str:
        """The calls without a reply, such as `run, sample x 12`."""
        tally = Counter(method for method, _ in self._calls.values())
        return ", ".join(f"{method} x {count}" if count > 1 else method for method, count in sorted(tally.items()))

    async def stalled(self, timeout_s: float) -> Stall:
        """Wait until the child sends no heartbeats, or makes no progress for `timeout_s` while calls run."""
        silence_s = min(SILENCE_S, SILENCE_SHARE * timeout_s)
        return await self.pulse.stalled(timeout_s, silence_s, lambda: bool(self._calls))

    def kill(self, end: ProcessEnd) -> None:
        """End the child and its own children at once, even one that is stopped. Calls fail as after its death."""
        self.end = end
        self._child.kill()
        self._listener.cancel()

    async def close(self) -> None:
        """End the child and wait for it. It is killed if it does not exit, or if the caller is cancelled."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await _close(self._writer)  # a child that is stuck does not read what was written
                await self._child.died.wait()
        except TimeoutError:
            log.warning("The engine process %d did not exit by itself and is killed.", self.pid)
        finally:
            if not self._child.died.is_set():
                self._child.kill()
            if self._pings is not None:
                self._pings.cancel()
        await self._child.died.wait()
        await asyncio.wait([self._listener])

    async def call(self, method: str, *args: Any, on_delta: OnDelta | None = None, **options: Any) -> Any:
        """Call a method in the child. Raises its error, or EngineDied."""
        if self.died.is_set():
            raise EngineDied("The engine process has ended.", _RETRY, from_outside=True)  # it did not get this call
        number = next(self._numbers)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = method, reply
        if on_delta is not None:
            self._listeners[number] = on_delta
        try:
            await _send(self._writer, (number, method, args, options, on_delta is not None))
            return await reply
        except _BROKEN as error:
            del self._calls[number]  # nothing waits for its reply
            if reply.done():
                reply.exception()
            await asyncio.wait([self._listener])
            raise self._death() from error
        finally:
            self._calls.pop(number, None)
            self._listeners.pop(number, None)

    async def _listen(self) -> None:
        try:
            while True:
                message = await _receive(self._reader)
                if isinstance(message, Heartbeat):
                    self.pulse.beat(message)
                else:
                    self._deliver(*message)
        except (asyncio.IncompleteReadError, OSError):
            pass  # the child ended
        except Exception:
            log.exception("A message of the engine process %d cannot be decoded; the process is restarted.", self.pid)
            self.end = ProcessEnd("it sent a message that cannot be decoded", from_outside=False)
        finally:
            try:
                if self.end is None:
                    self.end = await _end_of(self._child, self.pulse)
            finally:  # `kill` may come in between
                self.died.set()
                for _, reply in self._calls.values():
                    if not reply.done():
                        reply.set_exception(self._death())

    def _deliver(self, number: int, ok: bool, value: Any) -> None:
        """Pass a delta, a result or an error to the call that waits for it."""
        if isinstance(value, SequenceDelta):
            if (on_delta := self._listeners.get(number)) is not None:
                on_delta(value)
        elif number in self._calls and not (reply := self._calls[number][1]).done():
            reply.set_result(value) if ok else reply.set_exception(value)

    def _death(self) -> EngineDied:
        end = self.end or process_end(None, memory_ran_out=False)
        return EngineDied(f"The engine process has ended ({end.text}).", _RETRY, from_outside=end.from_outside)


async def _end_of(child: EngineProcess, pulse: Pulse) -> ProcessEnd:
    """Why a process ended whose connection has closed."""
    memory_ran_out = pulse.memory_ran_out()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(EXIT_TIMEOUT_S):
            await child.died.wait()
    return process_end(child.code, memory_ran_out=memory_ran_out)


async def _card(reader: asyncio.StreamReader, pulse: Pulse) -> ModelCard | TinsmithError:
    """The first reply of a child: its card or the error of loading. EngineDied if loading stalls."""

    async def receive() -> ModelCard | TinsmithError:
        while isinstance(message := await _receive(reader), Heartbeat):
            pulse.beat(message)
        return message

    reply = asyncio.create_task(receive())
    stalled = asyncio.create_task(pulse.stalled(LOAD_TIMEOUT_S, LOAD_TIMEOUT_S, lambda: True))
    try:
        await asyncio.wait((reply, stalled), return_when=asyncio.FIRST_COMPLETED)
        return await reply if reply.done() else EngineDied(f"Loading stalled: {stalled.result().reason}.")
    finally:
        reply.cancel()
        stalled.cancel()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(*_BROKEN):
        await writer.wait_closed()


async def _send(writer: asyncio.StreamWriter, message: Any) -> None:
    for part in encode(message):
        writer.write(part)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    (size,) = LENGTH_PREFIX.unpack(await reader.readexactly(LENGTH_PREFIX.size))
    return pickle.loads(await reader.readexactly(size))
