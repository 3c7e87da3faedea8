"""HTTP/1.1 connections with bounds on what a client may send and on how long it may take.

uvicorn's protocol limits neither the size of headers nor the time in which a request arrives. `BoundedProtocol` adds
both; `Connections` counts the open ones by address, and closes those whose client is too slow.
"""

from __future__ import annotations

import asyncio
import http
import ipaddress
import json
import resource
from collections import Counter
from dataclasses import dataclass
from typing import Any, NoReturn

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinsmith.plurals import counted
from tinsmith.service.limits.transport import JoinedWrites

HEADER_BYTES = 64 * 2**10
"""Largest request line and headers of a request, together."""
HEADERS = 128
"""Largest number of headers."""
PIPELINED = 16
"""Requests of a connection that may wait for a running one."""
KEEP_ALIVE_S = 120
"""Longer than clients keep idle connections, so that the server never closes one that is about to be reused."""
BODY_RATE = 8 * 2**10
"""Bytes per second that a client must send of a body, on average over `request_timeout_s`."""


class Refused(Exception):
    """The request being parsed is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The response to a request that cannot be read, after which its connection closes."""

    status: int
    detail: str

    def to_bytes(self) -> bytes:
        """The response as it is sent."""
        body = json.dumps({"detail": self.detail}).encode()
        head = (
            f"HTTP/1.1 {self.status} {http.HTTPStatus(self.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


class Connections:
    """Open connections, whose clients are not to be too many or too slow.

    A client on another machine may have `per_address` connections at a time; None is no limit. Connections of this
    machine are not counted: an SDK polls with hundreds, and all clients of a proxy have its address.
    """

    def __init__(self, per_address: int | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._per_address = per_address
        self._open: dict[BoundedProtocol, str] = {}
        self._by_address: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: BoundedProtocol, address: str) -> Refusal | None:
        """Count a new connection. Returns a refusal if there are too many."""
        self._open[connection] = address
        self._by_address[address] += 1
        if self._timer is None:
            self._wait()
        most = self._per_address
        if most is not None and self._by_address[address] > most and not _is_loopback(address):
            return Refusal(status=429, detail=f"Your address has {counted(most, 'open connection')}. Reuse them.")
        # Half of the files that the process may open: the other half is for the database, checkpoints and engines.
        if len(self._open) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            return Refusal(status=503, detail="This server has no connection left. Retry in a moment.")
        return None

    def discard(self, connection: BoundedProtocol) -> None:
        """Forget a connection that has ended."""
        address = self._open.pop(connection, None)
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(min(5.0, self.timeout_s / 4), self._check)

    def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        for connection in list(self._open):
            connection.check_time(now)
        self._timer = None
        if self._open:
            self._wait()


class BoundedProtocol(HttpToolsProtocol):
    """A connection that ends if its client sends too much before a body, or is too slow to send or to read."""

    def __init__(self, *, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self._is_receiving = False
        """Whether a request has begun to arrive and is not complete."""
        self._head_bytes = 0
        """Bytes of the request line and of complete headers."""
        self._header_count = 0
        self._unparsed_bytes = 0
        """Bytes since the parser last reported a part of a request: of an unfinished header, mostly."""
        self._has_headers = False
        self._body_bytes = 0
        """Bytes of the body since `_since`."""
        self._since: float | None = None
        """When the wait for the client began; None if it waits for the server."""
        self._full_since: float | None = None
        """When the client stopped reading."""
        self._refusal: Refusal | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoinedWrites(transport, self.loop))
        self._since = self.loop.time()
        refusal = self._connections.add(self, self.client[0] if self.client else "")
        if refusal is not None:
            self.refuse(refusal)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > HEADER_BYTES and not self.transport.is_closing():
            self.refuse(_headers_too_large())
        if self._is_receiving or self._is_idle_without_timer():
            self._since = self.loop.time() if self._since is None else self._since
        else:
            self._since = None

    @override
    def on_message_begin(self) -> None:
        self._is_receiving, self._has_headers = True, False
        self._head_bytes = self._header_count = self._body_bytes = 0
        self._since = self.loop.time()
        super().on_message_begin()

    @override
    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        if self._header_count > HEADERS:
            self._end_parsing(Refusal(status=431, detail=f"The request has over {HEADERS} headers. Send fewer."))
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        self._unparsed_bytes, self._since = 0, self.loop.time()
        if len(self.pipeline) >= PIPELINED:
            self._end_parsing(Refusal(status=429, detail=f"Over {PIPELINED} requests wait on this connection."))
        super().on_headers_complete()
        self._has_headers = True

    @override
    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        self._unparsed_bytes, self._is_receiving, self._since = 0, False, self.loop.time()
        super().on_message_complete()

    @override
    def send_400_response(self, msg: str) -> None:
        self.refuse(self._refusal or Refusal(status=400, detail=msg))

    @override
    def pause_writing(self) -> None:
        self._full_since = self.loop.time()
        super().pause_writing()

    @override
    def resume_writing(self) -> None:
        self._full_since = None
        super().resume_writing()

    def check_time(self, now: float) -> None:
        """Close the connection if its client has let the server wait for too long."""
        limit = self._connections.timeout_s
        if self._since is None and self.transport.is_closing():
            self._since = now
        if self._full_since is not None and now - self._full_since > limit:
            self.transport.abort()
        elif self._since is None or now - self._since <= limit:
            pass
        elif self.transport.is_closing():
            self.transport.abort()  # the client does not read the last response
        elif self._is_body_on_time(limit):
            self._since, self._body_bytes = now, 0
        elif not self._is_receiving:
            self.transport.close()
        else:
            self.refuse(Refusal(status=408, detail=f"The request did not arrive within {limit:g} s. Send it again."))

    def _is_body_on_time(self, limit: float) -> bool:
        """Whether the client sent enough of a body that is still read, or waits for the server to read it."""
        is_read = self._is_receiving and self._has_headers and not self.cycle.response_complete
        return is_read and (self.flow.read_paused or self._body_bytes >= BODY_RATE * limit)

    def _is_idle_without_timer(self) -> bool:
        """Whether only empty lines have arrived: they end uvicorn's keep-alive timer and begin no request."""
        return self.timeout_keep_alive_task is None and (self.cycle is None or self.cycle.response_complete)

    def _count_head(self, size: int) -> None:
        self._unparsed_bytes = 0
        self._head_bytes += size
        if self._head_bytes > HEADER_BYTES:
            self._end_parsing(_headers_too_large())

    def _end_parsing(self, refusal: Refusal) -> NoReturn:
        self._refusal = refusal
        raise Refused(refusal.detail)

    def refuse(self, refusal: Refusal) -> None:
        """Close the connection, with a response if that of an earlier request, or of this one, has not begun."""
        is_free = self.cycle is None or self.cycle.response_complete
        if self._has_headers and self._is_receiving:
            is_free = not self.cycle.response_started
        if is_free and not self.transport.is_closing():
            self.transport.write(refusal.to_bytes())
        self._since = self.loop.time()
        self.transport.close()


def _headers_too_large() -> Refusal:
    return Refusal(status=431, detail=f"The request line and headers are over {HEADER_BYTES} bytes. Send fewer.")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
