"""The engine's end of the socket: one thread reads messages and one writes them.

While the engine computes, its event loop stands still; a megabyte would come and go by a piece for each micro-batch.
The threads go on meanwhile, so a message is whole when the loop next turns, and an answer leaves at once.

Messages are pickles with a length before them: both ends are ours, on one machine.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

LENGTH = struct.Struct("<Q")


def packed(message: Any) -> tuple[bytes, bytes]:
    """A message as it goes over: its length, and itself."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)), data


class Link:
    """Ends the process when the other end hangs up: nothing here is worth waiting for then."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb", buffering=1 << 20)
        self._out: SimpleQueue[tuple[bytes, bytes]] = SimpleQueue()
        threading.Thread(target=self._write, name="link-write", daemon=True).start()

    def receive(self) -> Any:
        """The next message; waits for it."""
        (size,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return pickle.loads(self._exactly(size))

    def listen(self, hear: Callable[[Any], None]) -> None:
        """From now on `hear` is called with each message, in the running event loop."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop, hear), name="link-read", daemon=True).start()

    def send(self, message: Any) -> None:
        """Messages leave in the order of their sending; nothing waits for them. From any thread."""
        self._out.put(packed(message))

    def _read(self, loop: asyncio.AbstractEventLoop, hear: Callable[[Any], None]) -> None:
        try:
            while True:
                loop.call_soon_threadsafe(hear, self.receive())
        except Exception:  # noqa: BLE001 - whatever it is, a process that no longer reads must not seem to live
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
