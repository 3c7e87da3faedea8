"""Messages between processes of this package: pickles with a length prefix. Both ends are this program."""

from __future__ import annotations

import asyncio
import io
import pickle
import socket
import struct
from typing import Any, BinaryIO

LENGTH_PREFIX = struct.Struct("<Q")

_JOINED_BYTES = 1 << 16
"""Messages of up to this size are sent in one piece: a copy costs less than a system call."""


def encode(message: Any) -> tuple[bytes, ...]:
    """The length prefix and the content of a message, as the pieces to send."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    prefix = LENGTH_PREFIX.pack(len(data))
    return (prefix + data,) if len(data) <= _JOINED_BYTES else (prefix, data)


def send(connection: socket.socket, message: Any) -> None:
    """Send a message."""
    for part in encode(message):
        connection.sendall(part)


def receive(connection: socket.socket) -> bytearray:
    """Wait for the next message; `pickle.loads` decodes it. Raises EOFError if the other end has closed."""
    (size,) = LENGTH_PREFIX.unpack(receive_exactly(connection, LENGTH_PREFIX.size))
    return receive_exactly(connection, size)


def read(stream: BinaryIO | io.IOBase) -> bytes:
    """As `receive`, from a blocking stream."""
    (size,) = LENGTH_PREFIX.unpack(_read_exactly(stream, LENGTH_PREFIX.size))
    return _read_exactly(stream, size)


async def read_async(stream: asyncio.StreamReader) -> Any:
    """The next message of a stream, decoded. Raises IncompleteReadError if the other end has closed."""
    (size,) = LENGTH_PREFIX.unpack(await stream.readexactly(LENGTH_PREFIX.size))
    return pickle.loads(await stream.readexactly(size))


def receive_exactly(connection: socket.socket, size: int) -> bytearray:
    """The next `size` bytes. Raises EOFError if the other end has closed."""
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if not count:
            raise EOFError
        filled += count
    return data


def _read_exactly(stream: BinaryIO | io.IOBase, size: int) -> bytes:
    data = stream.read(size) or b""  # None: a socket's stream, silent for longer than its time-out
    if len(data) < size:
        raise EOFError
    return data
