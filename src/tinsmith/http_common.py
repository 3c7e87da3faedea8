"""What the service, the dashboard and the command share of HTTP: the listening socket, and why a server refused."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    import httpx

_BACKLOG = 2048
"""Connections that may wait to be accepted."""


def listen(host: str, port: int, family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    """The listening socket. Raises ConfigError if the port is in use or the host is not this machine's."""
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = str(error.strerror).partition(" (while attempting")[0]
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {reason}.",
            "Give another --port; 0 takes a free one."
            if error.errno == errno.EADDRINUSE
            else "Give a --host of this machine, or another --port.",
        ) from error
    # asyncio sets this only for sockets it makes; without it each response waits 40 ms for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def refusal(response: httpx.Response, address: str) -> str:
    """Why a Tinsmith server at `address` refused a request, in its own words if it gave any: the `detail` of the Tinker
    API, or the message of the OpenAI API's `error`."""
    try:
        body = response.json()
        return str(body["error"]["message"] if "error" in body else body["detail"])
    except (ValueError, KeyError, TypeError):
        return f"{address} responds with status {response.status_code}; is it a Tinsmith server?"
