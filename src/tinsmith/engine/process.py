"""The child process of an engine, so that the Python code of a forward pass never delays a response of the service.

`python -m tinsmith.engine.process FD` builds the engine and serves until the socket closes, which also happens when the
parent ends, in whatever way. The parent's side is `engine.remote`. Messages are pickles with a length prefix: both ends
are this program on one machine.

A ParentLink has one thread that reads, one that writes and one that sends heartbeats: while the engine computes, the
event loop stands still, but messages are still received, replies are sent, and the parent knows that the process lives.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Literal, Protocol

from tinsmith.engine.config import EngineConfig
from tinsmith.engine.interface import Engine
from tinsmith.engine.liveness import Heartbeat, blocks_moved, load_progress, send_heartbeats
from tinsmith.errors import ConfigError, EngineError, TinsmithError


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


_JOINED_BYTES = 1 << 16
"""Messages of up to this size are sent in one piece: a copy costs less than a system call."""


def encode(message: Any) -> tuple[bytes, ...]:
    """The length prefix and the content of a message, as the pieces to send."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    prefix = LENGTH_PREFIX.pack(len(data))
    return (prefix + data,) if len(data) <= _JOINED_BYTES else (prefix, data)


class Connection(Protocol):
    """A connected socket. One thread may receive while another sends."""

    def makefile(self, mode: Literal["rb"], *, buffering: int) -> Any:
        """A file that reads from it."""
        ...

    def sendall(self, data: bytes, /) -> None:
        """Send all of it."""
        ...


class ParentLink:
    """The child's end of the socket. Exits the process when the parent closes its end or dies."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._file = connection.makefile("rb", buffering=1 << 20)
        self._out: SimpleQueue[tuple[bytes, ...]] = SimpleQueue()
        self.progress: Callable[[], int] = load_progress
        """The progress counter that heartbeats carry."""
        self.on_end: Callable[[], None] = lambda: None
        """Called before the process ends with its parent."""
        threading.Thread(target=self._write, name="link-write", daemon=True).start()
        send_heartbeats(self.send, lambda: self.progress())

    def receive(self) -> Any:
        """Wait for the next message; pings are skipped."""
        while True:
            (size,) = LENGTH_PREFIX.unpack(self._exactly(LENGTH_PREFIX.size))
            message = pickle.loads(self._exactly(size))
            if not isinstance(message, Heartbeat):
                return message

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
            data = self._file.read(size) or b""  # None: silent for longer than the socket's time-out
        except OSError:
            data = b""
        if len(data) < size:
            self.on_end()
            os._exit(0)
        return data


async def serve(link: ParentLink, load: Callable[[Any], Engine] = build) -> None:
    """Load the engine with the first message, then handle each message in its own task, until the parent closes the
    socket."""
    engine = _load(link.receive(), link, load)
    if engine is None:
        await asyncio.to_thread(link.receive)  # the parent has the error now, and closes the socket
        return
    await answer_calls(engine, link)


async def answer_calls(engine: Any, link: ParentLink) -> None:
    """Handle each message, a call of the engine, in its own task, until the parent closes the socket."""
    tasks: set[asyncio.Task[None]] = set()
    served = 0

    def finish(task: asyncio.Task[None]) -> None:
        nonlocal served
        tasks.discard(task)
        served += 1

    def handle(message: Any) -> None:
        task = asyncio.create_task(_call(engine, link, *message))
        tasks.add(task)
        task.add_done_callback(finish)

    link.progress = lambda: engine.progress + served + blocks_moved()
    link.listen(handle)
    await asyncio.Event().wait()


def _load(config: Any, link: ParentLink, load: Callable[[Any], Engine]) -> Engine | None:
    """Build the engine and send its card, or send the error and return None."""
    try:
        engine = load(config)
    except TinsmithError as error:
        link.send(error)
        return None
    link.send(engine.card)
    return engine


async def _call(
    engine: Any,
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
    asyncio.run(serve(ParentLink(socket.socket(fileno=int(sys.argv[1])))))


if __name__ == "__main__":
    main()
