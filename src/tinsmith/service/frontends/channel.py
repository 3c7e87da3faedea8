"""A socket between a front end and the core, in an event loop: pickled messages with a length prefix, as for engines.

Both ends run this program on one machine. Messages of one turn of the event loop are written with one system call.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from tinsmith.engine.processes.worker import LENGTH_PREFIX, encode


class Channel(asyncio.Protocol):
    """One end of the socket. `on_message` is called with each message, `on_end` once, when the other end is gone."""

    def __init__(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        self._on_message, self._on_end = on_message, on_end
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received: list[bytes] = []
        self._size = 0
        """Bytes received of messages that are not complete."""
        self._needed = LENGTH_PREFIX.size
        """Bytes of the first of them; those of its length prefix until that is complete."""
        self._unsent: list[bytes] = []

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: object) -> None:
        """Send a message after those before it. Once the other end is gone, messages are dropped."""
        if not self.is_open:
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += encode(message)

    def close(self) -> None:
        """Close the socket once all messages are written."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        # Joined once when a message is complete: a buffer that grows would copy a large body again and again.
        self._received.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return
        received = memoryview(b"".join(self._received) if len(self._received) > 1 else data)
        start, self._needed = 0, LENGTH_PREFIX.size
        while self._size - start >= LENGTH_PREFIX.size:
            begin = start + LENGTH_PREFIX.size
            end = begin + LENGTH_PREFIX.unpack_from(received, start)[0]
            if end > self._size:
                self._needed = end - start
                break
            self._on_message(pickle.loads(received[begin:end]))
            start = end
        self._received = [bytes(received[start:])] if start < self._size else []
        self._size -= start

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

    def _flush(self) -> None:
        if self._unsent and self._transport is not None:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()


async def connect(channel: Channel, socket_: Any) -> None:
    """Let a channel read and write a connected socket."""
    await asyncio.get_running_loop().create_connection(lambda: channel, sock=socket_)
