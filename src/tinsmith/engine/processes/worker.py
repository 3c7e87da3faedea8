"""The process of an engine: receives calls of the service and answers them.

A program of a slot opens its link (`open_link`), loads the engine that the first message describes, and serves until
the socket closes, which also happens when the service ends, in whatever way. The service's side is `client`. Messages
are pickles with a length prefix: both ends are this program.

A ParentLink has one thread that reads, one that writes and one that sends heartbeats: while the engine computes, the
event loop stands still, but messages are still received, replies are sent, and the parent knows that the process lives.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import threading
import traceback
from collections.abc import Callable, Container
from queue import SimpleQueue
from typing import Any

from tinsmith.engine.interface import Engine
from tinsmith.engine.processes.dial import connect_to_service
from tinsmith.engine.processes.heartbeat import Heartbeat, blocks_moved, load_progress, send_heartbeats
from tinsmith.engine.processes.rpc import Call, Delta, Reply, methods_of
from tinsmith.engine.processes.tls import TlsSocket
from tinsmith.errors import EngineError, TinsmithError
from tinsmith.processes import garbage_collection
from tinsmith.processes.messages import encode, read


class ParentLink:
    """The child's end of the socket. Exits the process when the parent closes its end or dies."""

    def __init__(self, connection: socket.socket | TlsSocket) -> None:
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
            message = pickle.loads(self._read_message())
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

    def _read_message(self) -> bytes:
        try:
            return read(self._file)
        except (EOFError, OSError):
            self.on_end()
            os._exit(0)


def open_link() -> tuple[ParentLink, bytes]:
    """Connect this process to the service: the first call of a program. Returns the payload of its launch token too."""
    connection, launch_token = connect_to_service()
    return ParentLink(connection), launch_token.payload


async def serve(link: ParentLink, load: Callable[[Any], Engine]) -> None:
    """Load the engine with the first message, then handle each message in its own task, until the parent closes the
    socket."""
    engine = _load(link.receive(), link, load)
    if engine is None:
        await asyncio.to_thread(link.receive)  # the parent has the error now, and closes the socket
        return
    await answer_calls(engine, link)


async def answer_calls(engine: Any, link: ParentLink) -> None:
    """Handle each message, a call of the engine, in its own task, until the parent closes the socket."""
    methods = methods_of(type(engine))
    tasks: set[asyncio.Task[None]] = set()
    served = 0

    def finish(task: asyncio.Task[None]) -> None:
        nonlocal served
        tasks.discard(task)
        served += 1

    def handle(call: Call) -> None:
        task = asyncio.create_task(_answer(engine, methods, call, link))
        tasks.add(task)
        task.add_done_callback(finish)

    link.progress = lambda: engine.progress + served + blocks_moved()
    link.listen(handle)
    await asyncio.Event().wait()


def _load(config: Any, link: ParentLink, load: Callable[[Any], Engine]) -> Engine | None:
    """Build the engine and send its card, or send the error and return None."""
    try:
        with garbage_collection.paused():
            engine = load(config)
    except TinsmithError as error:
        link.send(error)
        return None
    garbage_collection.leave_out_existing()
    link.send(engine.card)
    return engine


async def _answer(engine: Any, methods: Container[str], call: Call, link: ParentLink) -> None:
    """Call the engine's method and send its result, and before it the deltas of a sample."""
    options = call.options
    if call.streams:
        options["on_delta"] = lambda delta: link.send(Delta(call.number, delta))
    try:
        if call.method not in methods:
            raise EngineError(f"The engine has no method {call.method}.")
        reply = Reply(call.number, True, await getattr(engine, call.method)(*call.args, **options))
    except TinsmithError as error:
        reply = Reply(call.number, False, error)
    except Exception as error:  # noqa: BLE001 - the process boundary: every error must reach the caller
        failure = EngineError(f"{call.method} failed in the engine: {type(error).__name__}: {error}")
        reply = Reply(call.number, False, failure)
    link.send(reply)
