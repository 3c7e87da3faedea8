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
import ssl
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from typing_extensions import override

from tinsmith.engine.base import ModelCard, OnDelta
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.process_end import ProcessEnd, process_end
from tinsmith.engine.processes.heartbeat import (
    LOAD_TIMEOUT_S,
    SILENCE_S,
    SILENCE_SHARE,
    Heartbeat,
    HeartbeatMonitor,
)
from tinsmith.engine.processes.rpc import Call, Delta, EngineClient, Method, Reply
from tinsmith.engine.processes.slots import LocalSlot, Program, Slot, SlotProcess
from tinsmith.errors import EngineDied, TinsmithError
from tinsmith.processes.messages import encode, read_async

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

BUFFER_BYTES = 1 << 24
"""Bytes of a process's messages that are read ahead."""
CLOSE_TIMEOUT_S = 1.0
"""Time for a child to exit. It has nothing to finish: files are written to a temporary name first."""
EXIT_TIMEOUT_S = 2.0
"""Time for the exit status of a child whose connection has closed."""

_BROKEN = (ConnectionError, ssl.SSLError)  # of a connection that has ended; SSLError: data arrives while TLS closes
_RETRY = "It is being restarted: try again later."


class ServedEngine(EngineClient, ABC):
    """An engine in processes of its own, which are watched from here."""

    died: asyncio.Event
    heartbeats: HeartbeatMonitor
    end: ProcessEnd | None
    """Why the processes ended."""

    @property
    @abstractmethod
    def card(self) -> ModelCard:
        """The loaded base model."""

    @property
    @abstractmethod
    def progress(self) -> int:
        """Grows while the engine works."""

    @property
    @abstractmethod
    def leader(self) -> RemoteEngine:
        """The process that takes the calls."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id of the leader."""

    @abstractmethod
    def running(self) -> str:
        """The calls without a reply, such as `run, sample x 12`."""

    @abstractmethod
    async def stalled(self, timeout_s: float) -> ProcessEnd:
        """Wait until a process sends no heartbeats, or none makes progress for `timeout_s` while calls run."""

    @abstractmethod
    def kill(self, end: ProcessEnd) -> None:
        """End all its processes at once, even those that are stopped. Calls fail as after their death."""

    @abstractmethod
    async def close(self) -> None:
        """End all its processes and wait for them."""


WORKER = Program(module="tinsmith.engine.cluster.worker")


async def start_engine(
    slot: Slot, config: Any, source: str, generation: int = 1, program: Program = WORKER, payload: bytes = b""
) -> RemoteEngine:
    """Start a program in a slot, send it the settings of its engine and wait until its model is loaded.

    `source` names the model in errors; `payload` is for the launch token. Raises the error of loading, or EngineDied.
    """
    process = await slot.start(replace(program, payload=payload), generation)
    try:
        reader, writer = await process.connect(BUFFER_BYTES)
        return await RemoteEngine.over(process, reader, writer, config, source, ping_s=process.ping_s)
    except BaseException:
        process.kill()
        raise


async def start_local(config: EngineConfig) -> RemoteEngine:
    """Start the only engine of this machine, in a slot with all its GPUs. Raises as `start_engine`."""
    return await start_engine(LocalSlot("engine"), config, config.source, program=replace(WORKER, environment={}))


class RemoteEngine(ServedEngine):
    """Implements `engine.interface.Engine` for an engine in a child process; `start_engine` makes one."""

    def __init__(
        self,
        card: ModelCard,
        child: SlotProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        heartbeats: HeartbeatMonitor,
    ) -> None:
        self._card = card
        self.died = asyncio.Event()
        self.heartbeats = heartbeats
        self.end: ProcessEnd | None = None
        """Why the child ended."""
        self.explain_death: Callable[[EngineDied], Awaitable[EngineDied]] | None = None
        """The error of a group for a death of this process, which leads it; None without a group."""
        self._child, self._reader, self._writer = child, reader, writer
        self._numbers = itertools.count()
        self._calls: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        """Method and reply of each call without a reply, by number."""
        self._listeners: dict[int, OnDelta] = {}
        self._listener = asyncio.create_task(self._listen())
        self._pings: asyncio.Task[None] | None = None

    @classmethod
    async def over(
        cls,
        child: SlotProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        config: Any,
        source: str,
        *,
        ping_s: float = 0.0,
    ) -> RemoteEngine:
        """Send a process the settings of its engine and wait until its model is loaded.

        Raises the error that loading raised in the process, or EngineDied if it ended or stalled.

        `ping_s`: time between pings, for a process that ends itself when it hears nothing; 0 sends none.
        """
        heartbeats = HeartbeatMonitor()
        try:
            await _send(writer, config)
            card = await _card(reader, heartbeats)
        except (asyncio.IncompleteReadError, OSError):
            end = await _end_of(child, heartbeats)
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
        engine = cls(card, child, reader, writer, heartbeats)
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
    @override
    def card(self) -> ModelCard:
        return self._card

    @property
    @override
    def leader(self) -> RemoteEngine:
        return self

    @property
    @override
    def pid(self) -> int:
        return self._child.pid

    @property
    @override
    def progress(self) -> int:
        return self.heartbeats.progress

    @override
    def running(self) -> str:
        tally = Counter(method for method, _ in self._calls.values())
        return ", ".join(f"{method} x {count}" if count > 1 else method for method, count in sorted(tally.items()))

    @override
    async def stalled(self, timeout_s: float) -> ProcessEnd:
        silence_s = min(SILENCE_S, SILENCE_SHARE * timeout_s)
        return await self.heartbeats.stalled(timeout_s, silence_s, lambda: bool(self._calls))

    @override
    def kill(self, end: ProcessEnd) -> None:
        self.end = end
        self._child.kill()
        self._listener.cancel()

    @override
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

    @override
    async def call(self, method: Method[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Call a method in the child. Raises its error, or EngineDied."""
        try:
            return await self._call(method, *args, **options)
        except EngineDied as error:
            death = error if self.explain_death is None else await self.explain_death(error)
            if death is error:
                raise
            raise death from error

    async def _call(self, method: Method[P, R], *args: P.args, **options: P.kwargs) -> R:
        if self.died.is_set():
            raise EngineDied("The engine process has ended.", _RETRY, from_outside=True)  # it did not get this call
        number = next(self._numbers)
        reply: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._calls[number] = method.__name__, reply
        on_delta: Any = options.pop("on_delta", None)
        if on_delta is not None:
            self._listeners[number] = on_delta
        try:
            await _send(self._writer, Call(number, method.__name__, args, options, on_delta is not None))
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
                message = await read_async(self._reader)
                if isinstance(message, Heartbeat):
                    self.heartbeats.beat(message)
                else:
                    self._deliver(message)
        except (asyncio.IncompleteReadError, OSError):
            pass  # the child ended
        except Exception:
            log.exception("A message of the engine process %d cannot be decoded; the process is restarted.", self.pid)
            self.end = ProcessEnd("it sent a message that cannot be decoded", from_outside=False)
        finally:
            try:
                if self.end is None:
                    self.end = await _end_of(self._child, self.heartbeats)
            finally:  # `kill` may come in between
                self.died.set()
                for _, reply in self._calls.values():
                    if not reply.done():
                        reply.set_exception(self._death())

    def _deliver(self, message: Delta | Reply) -> None:
        """Pass a delta, a result or an error to the call that waits for it."""
        if isinstance(message, Delta):
            if (on_delta := self._listeners.get(message.number)) is not None:
                on_delta(message.delta)
        elif message.number in self._calls and not (reply := self._calls[message.number][1]).done():
            reply.set_result(message.value) if message.ok else reply.set_exception(message.value)

    def _death(self) -> EngineDied:
        end = self.end or process_end(None, memory_ran_out=False)
        return EngineDied(f"The engine process has ended ({end.text}).", _RETRY, from_outside=end.from_outside)


async def _end_of(child: SlotProcess, heartbeats: HeartbeatMonitor) -> ProcessEnd:
    """Why a process ended whose connection has closed."""
    memory_ran_out = heartbeats.memory_ran_out()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(EXIT_TIMEOUT_S):
            await child.died.wait()
    return process_end(child.code, memory_ran_out=memory_ran_out)


async def _card(reader: asyncio.StreamReader, heartbeats: HeartbeatMonitor) -> ModelCard | TinsmithError:
    """The first reply of a child: its card or the error of loading. EngineDied if loading stalls."""

    async def receive() -> ModelCard | TinsmithError:
        while isinstance(message := await read_async(reader), Heartbeat):
            heartbeats.beat(message)
        return message

    reply = asyncio.create_task(receive())
    stalled = asyncio.create_task(heartbeats.stalled(LOAD_TIMEOUT_S, LOAD_TIMEOUT_S, lambda: True))
    try:
        await asyncio.wait((reply, stalled), return_when=asyncio.FIRST_COMPLETED)
        return await reply if reply.done() else EngineDied(f"Loading {stalled.result().text}.")
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
