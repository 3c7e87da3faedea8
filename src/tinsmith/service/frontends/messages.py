"""Messages between a front end and the core. They are named tuples, which pickle in a microsecond.

A front end numbers its requests and its connections. A message with the `number` of a request that has ended is
ignored.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class FrontendSettings(NamedTuple):
    """What a front end is started with, as JSON."""

    request_timeout_s: float
    log_format: Literal["text", "json"]
    log_level: str


class Head(NamedTuple):
    """Request line, headers and addresses of a request: keys of an ASGI scope."""

    method: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: list[tuple[bytes, bytes]]
    http_version: str
    scheme: str
    root_path: str
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None


# From a front end to the core.


class ForwardedRequest(NamedTuple):
    """A request, with its body if that is small; a large one is sent when the core reads it."""

    number: int
    head: Head
    body: bytes | None
    decoded: bytes | None


class BodyPart(NamedTuple):
    """A part of a body, in reply to `ReadBody`; with `decoded`, the whole body, decompressed."""

    number: int
    body: bytes
    more: bool
    decoded: bytes | None


class PartWritten(NamedTuple):
    """A part of a response has been passed on to the client's connection."""

    number: int


class ClientGone(NamedTuple):
    """The client has disconnected before it had the response."""

    number: int


class ConnectionOpened(NamedTuple):
    """A client has connected."""

    number: int
    address: str


class ConnectionClosed(NamedTuple):
    """A client's connection has ended."""

    number: int


class FrontendAlive(NamedTuple):
    """The event loop of the front end runs."""


# From the core to a front end.


class ReadBody(NamedTuple):
    """The core reads the next part of a body."""

    number: int


class ResponseStart(NamedTuple):
    """Status and headers of a response and the first part of its body."""

    number: int
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    more: bool


class ResponsePart(NamedTuple):
    """A further part of the body of a response."""

    number: int
    body: bytes
    more: bool


class ResponseAborted(NamedTuple):
    """The response cannot be completed: its connection closes."""

    number: int


class RefuseConnection(NamedTuple):
    """The address of a connection has too many."""

    number: int
    status: int
    detail: str


class Stop(NamedTuple):
    """Accept no more connections, and end when the open responses have ended."""


FromCore = ReadBody | ResponseStart | ResponsePart | ResponseAborted
"""Messages about a request."""
