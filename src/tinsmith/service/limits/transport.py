"""A connection's transport that sends the head and the body of a response together.

uvicorn writes them one after the other, and a second system call costs more than a small response takes to compute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from typing_extensions import override

_HEAD_START, _HEAD_END = b"HTTP/1.1 ", b"\r\n\r\n"


class JoinedWrites(asyncio.Transport):
    """Holds the head of a response until the next write, and for one step of the event loop at most."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport, self._loop = transport, loop
        self._head: bytes | bytearray | memoryview = b""

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._head:
            data, self._head = b"".join((self._head, data)), b""
        elif data[:9] == _HEAD_START and data[-4:] == _HEAD_END:
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    @override
    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    @override
    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    @override
    def close(self) -> None:
        self._flush()
        self._transport.close()

    @override
    def abort(self) -> None:
        self._transport.abort()

    @override
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    @override
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    @override
    def pause_reading(self) -> None:
        self._transport.pause_reading()

    @override
    def resume_reading(self) -> None:
        self._transport.resume_reading()

    @override
    def is_reading(self) -> bool:
        return self._transport.is_reading()

    @override
    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    @override
    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + len(self._head)

    @override
    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._transport.get_write_buffer_limits()

    @override
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    @override
    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    @override
    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._transport.get_protocol()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)
