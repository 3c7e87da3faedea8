"""Connections between the service and the processes of slots, and what such a process does first.

A process is started with a launch token on its standard input. On the machine of its starter it inherits a connected
socket, whose number the token names. Elsewhere, and with TLS, it binds a free port and reports it on standard output;
the service dials it. Both ends prove that they have the secret of the token before anything is unpickled: the process
sends a nonce, the dialler answers with a nonce and an HMAC of both, and the process with another HMAC. A secret belongs
to one start of one process, so a process or a dialler of an earlier generation is refused, and a connection carries
messages of one generation only.

After the handshake the messages are those of `worker.ParentLink`. They are encrypted, and so is the handshake, if the
launch token has the certificate of the service (`tls`); a process then reports its own certificate with its port.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import pickle
import socket
import ssl
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, BinaryIO

from tinsmith.engine.processes.tls import Identity, TlsSocket
from tinsmith.errors import EngineDied
from tinsmith.processes.messages import encode, read
from tinsmith.processes.parent import watch_parent

TOKEN_BYTES = 32
HANDSHAKE_S = 5.0
"""Time for the handshake of a connection."""
SHUTDOWN_S = 1.0
"""Time for a process to answer the end of TLS; one that is stopped does not."""
DIAL_S = 20.0
"""Time to reach a process that has reported its port."""
SILENCE_S = 60.0
"""A process that hears nothing for this long ends itself: the service, or the network to it, is gone."""
PING_S = 5.0
"""Time between two pings of the service."""
MAX_HANDSHAKES = 64
"""Connections that a process is in a handshake with at a time."""

_REPORT = struct.Struct("<II")
"""Port of a process, and the size of its certificate, which follows."""
_GENERATION = struct.Struct("<Q")
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchToken:
    """What a process is given at its start."""

    secret: bytes
    """32 random bytes, of this start only."""
    generation: int
    host: str
    """Address to bind; other machines must be able to reach it."""
    descriptor: int = -1
    """Of the connected socket that the process inherits; -1 if it is to listen."""
    payload: bytes = b""
    """Data of the caller."""
    certificate: bytes = b""
    """Of the service, which alone may connect; empty without TLS."""

    @classmethod
    def new(cls, generation: int, host: str, payload: bytes = b"", identity: Identity | None = None) -> LaunchToken:
        """A launch token with a secret of its own. `identity`: of the service, for TLS."""
        certificate = identity.certificate if identity is not None else b""
        return cls(
            secret=os.urandom(TOKEN_BYTES), generation=generation, host=host, payload=payload, certificate=certificate
        )


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process listens."""

    host: str
    port: int
    certificate: bytes = b""
    """Of the process; empty without TLS."""


# The process.


def connect_to_service() -> tuple[socket.socket | TlsSocket, LaunchToken]:
    """Read the launch token, end with the parent from now on, and connect to the service: the first call of a program.

    Standard output then goes where standard error goes.
    """
    launch_token = read_launch_token(sys.stdin.buffer)
    watch_parent(lambda: os._exit(0), descriptor=0)  # where the system does not end it: `parent`
    reports = os.dup(1)
    os.dup2(2, 1)
    with open(reports, "wb", buffering=0) as report:
        if launch_token.descriptor >= 0:
            return socket.socket(fileno=launch_token.descriptor), launch_token
        listener = Listener(launch_token)
        certificate = listener.identity.certificate if listener.identity is not None else b""
        report.write(_REPORT.pack(listener.port, len(certificate)) + certificate)
    return listener.accept(), launch_token


class Listener:
    """The listening socket of a process, until the service has connected."""

    def __init__(self, launch_token: LaunchToken) -> None:
        self.launch_token = launch_token
        self.identity = Identity.new() if launch_token.certificate else None
        self._socket = socket.create_server((launch_token.host, 0), backlog=16)

    @property
    def port(self) -> int:
        """The port that it is bound to."""
        return self._socket.getsockname()[1]

    def accept(self) -> socket.socket | TlsSocket:
        """Wait for the connection of the service. Connections without the secret, or without TLS where there is a
        certificate, are closed. Handshakes run side by side, so that no stranger delays the service."""
        admitted: SimpleQueue[socket.socket | TlsSocket] = SimpleQueue()
        threading.Thread(target=self._listen, args=(admitted,), name="listener", daemon=True).start()
        link = admitted.get()
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes `_listen`
        self._socket.close()
        return link

    def _listen(self, admitted: SimpleQueue[socket.socket | TlsSocket]) -> None:
        free = threading.Semaphore(MAX_HANDSHAKES)

        def admit(connection: socket.socket) -> None:
            link = self._handshake(connection)
            free.release()
            if link is not None:
                admitted.put(link)

        with suppress(OSError):  # closed by `accept`
            while True:
                free.acquire()
                connection, _ = self._socket.accept()
                threading.Thread(target=admit, args=(connection,), name="handshake", daemon=True).start()

    def _handshake(self, connection: socket.socket) -> socket.socket | TlsSocket | None:
        """The link with whoever has connected; None, and the connection closed, if it is not the service."""
        connection.settimeout(HANDSHAKE_S)
        link: socket.socket | TlsSocket = connection
        try:
            if self.identity is not None:
                link = TlsSocket(connection, self.identity.context(self.launch_token.certificate, accepts=True))
                link.handshake(HANDSHAKE_S)
            _admit(link, self.launch_token)
        except (OSError, PermissionError):
            connection.close()
            return None
        connection.settimeout(None)
        set_options(connection)
        # A timeout of Python's would hold for sending too, where a large message may take longer.
        silence = struct.pack("ll", int(SILENCE_S), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, silence)
        return link


def read_launch_token(stream: BinaryIO) -> LaunchToken:
    """The launch token on standard input, which only the parent can write. Ends the process if the parent is gone."""
    try:
        message = read(stream)
    except EOFError:
        os._exit(0)
    return pickle.loads(message)


def encode_launch_token(launch_token: LaunchToken) -> bytes:
    """A launch token as `read_launch_token` reads it."""
    return b"".join(encode(launch_token))


async def read_report(stream: asyncio.StreamReader) -> tuple[int, bytes]:
    """The port and the certificate that a process reports. Raises IncompleteReadError if it ends before."""
    port, size = _REPORT.unpack(await stream.readexactly(_REPORT.size))
    return port, await stream.readexactly(size)


def _admit(connection: socket.socket | TlsSocket, launch_token: LaunchToken) -> None:
    """The process's half of the handshake. Raises PermissionError, or OSError if the connection breaks."""
    deadline = time.monotonic() + HANDSHAKE_S
    nonce = os.urandom(TOKEN_BYTES)
    connection.sendall(nonce)
    reply = b""
    while len(reply) < _GENERATION.size + TOKEN_BYTES + _DIGEST_BYTES:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(_GENERATION.size + TOKEN_BYTES + _DIGEST_BYTES - len(reply))
        if not part:
            raise ConnectionError
        reply += part
    head, proof = reply[:-_DIGEST_BYTES], reply[-_DIGEST_BYTES:]
    (generation,) = _GENERATION.unpack(head[: _GENERATION.size])
    is_proven = hmac.compare_digest(proof, _proof(launch_token.secret, b"dial", nonce, head))
    if not is_proven or generation != launch_token.generation:
        raise PermissionError
    connection.sendall(_proof(launch_token.secret, b"accept", nonce, head))


# The service.


async def dial(
    address: Address, launch_token: LaunchToken, identity: Identity | None = None, buffer: int = 1 << 16
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a process. `identity`: that of its launch token, for TLS. `buffer`: bytes that are read ahead.

    Raises EngineDied if the process cannot be reached, or does not prove that it has this token, or this certificate.
    """
    options: dict[str, Any] = {}
    if identity is not None:
        context = identity.context(address.certificate, accepts=False)
        options = {"ssl": context, "ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": SHUTDOWN_S}
    try:
        async with asyncio.timeout(DIAL_S):
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=buffer, **options)
    except ssl.SSLError as error:
        raise EngineDied(f"{address.host}:{address.port} is not the process started: {error.reason}.") from error
    except (OSError, TimeoutError) as error:
        raise EngineDied(f"{address.host}:{address.port} cannot be reached: {error}.", from_outside=True) from error
    set_options(writer.get_extra_info("socket"))
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            nonce = await reader.readexactly(TOKEN_BYTES)
            head = _GENERATION.pack(launch_token.generation) + os.urandom(TOKEN_BYTES)
            writer.write(head + _proof(launch_token.secret, b"dial", nonce, head))
            proof = await reader.readexactly(_DIGEST_BYTES)
        if not hmac.compare_digest(proof, _proof(launch_token.secret, b"accept", nonce, head)):
            raise PermissionError("it has another token")
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        reason = "it refused the token" if isinstance(error, asyncio.IncompleteReadError) else str(error) or "time-out"
        raise EngineDied(f"{address.host}:{address.port} is not the process started: {reason}.") from error
    return reader, writer


def set_options(connection: Any) -> None:
    """Send small messages at once, and notice a peer whose machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6), ("TCP_USER_TIMEOUT", 60_000)):
        if (number := vars(socket).get(name)) is not None:  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, number, value)


def _proof(token: bytes, side: bytes, nonce: bytes, head: bytes) -> bytes:
    return hmac.digest(token, side + nonce + head, "sha256")
