"""An engine in a child process, so that the Python code of a forward pass never delays a response of the service.

The parent has a RemoteEngine: each method sends one message over a socket pair and receives one reply, matched by
number; if a sample has `on_delta`, its deltas come before the reply, under the same number. Messages are pickles with a
length prefix, since both ends are this program on one machine.

The child (`python -m tinsmith.engine.process FD`) builds the engine and serves until the socket closes, which also
happens when the parent ends (tinsmith/parent_process.py). If the child dies, every call fails with EngineDied and
`died` is set; starting another engine is up to the caller.

The parent's end of the socket is asyncio's. The child's is a ParentLink with one thread that reads and one that writes:
while the engine computes, the child's event loop stands still, but messages are still received and replies are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tinsmith.engine.base import (
    AdamParams,
    Engine,
    LoraSpec,
    ModelCard,
    OnDelta,
    Pass,
    PassResult,
    SampleRequest,
    SampleResult,
    SequenceDelta,
)
from tinsmith.engine.config import EngineConfig
from tinsmith.errors import ConfigError, EngineDied, EngineError, TinsmithError


def build(config: EngineConfig) -> Engine:
    """Load an engine in this process. Raises ConfigError or Unsupported if the model cannot be served."""
    if config.sampler == "vllm":
        raise ConfigError("sampler: vllm needs processes of its own.", "Use engine.vllm.engine.VllmEngine.start.")
    if config.kind == "fake":
        from tinsmith.engine.fake.engine import FakeEngine

        return FakeEngine(config)
    from tinsmith.engine.torch_engine import TorchEngine

    return TorchEngine(config)


LENGTH_PREFIX = struct.Struct("<Q")


def encode(message: Any) -> tuple[bytes, bytes]:
    """The length prefix and the content of a message."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH_PREFIX.pack(len(data)), data


class ParentLink:
    """The child's end of the socket. Exits the process when the parent closes its end or dies."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb", buffering=1 << 20)
        self._out: SimpleQueue[tuple[bytes, bytes]] = SimpleQueue()
        threading.Thread(target=self._write, name="link-write", daemon=True).start()

    def receive(self) -> Any:
        """Wait for the next message."""
        (size,) = LENGTH_PREFIX.unpack(self._exactly(LENGTH_PREFIX.size))
        return pickle.loads(self._exactly(size))

    def listen(self, handle: Callable[[Any], None]) -> None:
        """From now on, call `handle` with each message in the running event loop."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop, handle), name="link-read", daemon=True).start()

    def send(self, message: Any) -> None:
        """Queue a message. Messages are sent in order; may be called from any thread."""
        self._out.put(encode(message))

    def _read(self, loop: asyncio.AbstractEventLoop, handle: Callable[[Any], None]) -> None:
        try:
            while True:
                loop.call_soon_threadsafe(handle, self.receive())
        except Exception:  # noqa: BLE001 - a process that no longer reads must not seem alive
            traceback.print_exc()
            os._exit(1)

    def _write(self) -> None:
        while True:
            parts = self._out.get()
            try:
                for part in parts:
                    self._connection.sendall(part)
            except OSError:
                os._exit(0)

    def _exactly(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except OSError:
            data = b""
        if len(data) < size:
            os._exit(0)
        return data


log = logging.getLogger(__name__)

_BUFFER = 1 << 24
CLOSE_TIMEOUT_S = 4.0
_CHILD_ENV = {"OMP_WAIT_POLICY": "passive"}
"""OpenMP threads sleep while they wait for each other. By default they spin, which made decoding 6 to 10 times slower
when another process (a training loop, a browser) kept as many cores busy."""


class RemoteEngine:
    """Implements `engine.base.Engine` for an engine in a child process; create it with `start`."""

    def __init__(
        self,
        card: ModelCard,
        child: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.card = card
        self.died = asyncio.Event()
        self._child, self._reader, self._writer = child, reader, writer
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._listeners: dict[int, OnDelta] = {}
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, config: EngineConfig) -> RemoteEngine:
        """Start a child and wait until its model is loaded. Raises the error that loading raised in the child."""
        ours, theirs = socket.socketpair()
        with theirs:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", __name__, str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=_CHILD_ENV | os.environ,
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=_BUFFER)
        try:
            await _send(writer, config)
            card = await _receive(reader)
        except (asyncio.IncompleteReadError, OSError):
            code = await child.wait()
            hint = "The system killed it, most likely because memory ran out." if code == -signal.SIGKILL else ""
            card = EngineDied(f"The engine for {config.source} ended during loading (exit {code}).", hint)
        if isinstance(card, Exception):
            await _close(writer)
            await child.wait()
            raise card
        return cls(card, child, reader, writer)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        await self._call("create", model_id, lora)

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        return await self._call("run", list(passes))

    async def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        return await self._call("step", model_id, adam)

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        return await self._call("save", model_id, to, optimizer=optimizer)

    async def load(self, model_id: str, source: Path, *, optimizer: bool) -> None:
        await self._call("load", model_id, source, optimizer=optimizer)

    async def drop(self, model_id: str) -> None:
        await self._call("drop", model_id)

    async def capture(self, model_id: str, version: str) -> None:
        await self._call("capture", model_id, version)

    async def persist(self, version: str, to: Path) -> int:
        return await self._call("persist", version, to)

    async def attach(self, version: str, source: Path) -> None:
        await self._call("attach", version, source)

    async def detach(self, version: str) -> None:
        await self._call("detach", version)

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        return await self._call("sample", request, on_delta=on_delta)

    async def cancel(self, request_id: str) -> None:
        await self._call("cancel", request_id)

    async def close(self) -> None:
        """End the child and wait for it. It is killed if it does not exit, or if the caller is cancelled."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await _close(self._writer)  # a child that is stuck does not read what was written
                await self._child.wait()
        except TimeoutError:
            log.warning("The engine process %d did not exit by itself and is killed.", self.pid)
        finally:
            if self._child.returncode is None:
                self._child.kill()
        await self._child.wait()
        await self._listener

    async def _call(self, method: str, *args: Any, on_delta: OnDelta | None = None, **options: Any) -> Any:
        if self.died.is_set():
            raise _ended()
        number = next(self._numbers)
        self._calls[number] = asyncio.get_running_loop().create_future()
        if on_delta is not None:
            self._listeners[number] = on_delta
        try:
            await _send(self._writer, (number, method, args, options, on_delta is not None))
            return await self._calls[number]
        except ConnectionError as error:
            raise _ended() from error
        finally:
            self._calls.pop(number, None)
            self._listeners.pop(number, None)

    async def _listen(self) -> None:
        try:
            while True:
                number, ok, value = await _receive(self._reader)
                call = self._calls.get(number)
                if isinstance(value, SequenceDelta):
                    if (on_delta := self._listeners.get(number)) is not None:
                        on_delta(value)
                elif call is not None and not call.done():
                    call.set_result(value) if ok else call.set_exception(value)
        except (asyncio.IncompleteReadError, OSError):
            pass  # the child ended
        except Exception:
            log.exception("A message of the engine process %d cannot be decoded; the process is restarted.", self.pid)
        finally:
            self.died.set()
            for call in self._calls.values():
                if not call.done():
                    call.set_exception(_ended())


def _ended() -> EngineDied:
    return EngineDied("The engine process has ended.", "It is being restarted: try again later.")


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def _send(writer: asyncio.StreamWriter, message: Any) -> None:
    for part in encode(message):
        writer.write(part)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    (size,) = LENGTH_PREFIX.unpack(await reader.readexactly(LENGTH_PREFIX.size))
    return pickle.loads(await reader.readexactly(size))


async def _serve(link: ParentLink) -> None:
    """Load the engine, then handle each message in its own task, until the parent closes the socket."""
    engine = _load(link.receive(), link)
    if engine is None:
        await asyncio.to_thread(link.receive)  # the parent has the error now, and closes the socket
        return
    tasks: set[asyncio.Task[None]] = set()

    def handle(message: Any) -> None:
        task = asyncio.create_task(_call(engine, link, *message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    link.listen(handle)
    await asyncio.Event().wait()


def _load(config: EngineConfig, link: ParentLink) -> Engine | None:
    """Build the engine and send its card, or send the error and return None."""
    try:
        engine = build(config)
    except TinsmithError as error:
        link.send(error)
        return None
    link.send(engine.card)
    return engine


async def _call(
    engine: Engine,
    link: ParentLink,
    number: int,
    method: str,
    args: tuple[Any, ...],
    options: dict[str, Any],
    streams: bool,
) -> None:
    """Call the engine's method and send its result; with `streams`, send the deltas of a sample before."""
    if streams:
        options["on_delta"] = lambda delta: link.send((number, True, delta))
    try:
        reply = (number, True, await getattr(engine, method)(*args, **options))
    except TinsmithError as error:
        reply = (number, False, error)
    except Exception as error:  # noqa: BLE001 - the process boundary: every error must reach the caller
        reply = (number, False, EngineError(f"{method} failed in the engine: {type(error).__name__}: {error}"))
    link.send(reply)


def main() -> None:
    """Entry point of the child; the only argument is the socket's file descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the socket
    asyncio.run(_serve(ParentLink(socket.socket(fileno=int(sys.argv[1])))))


if __name__ == "__main__":
    main()
