"""TLS between the service and the processes of a cluster (`cluster.tls`).

Each end makes a key pair of its own at its start, and the other end accepts its certificate and no other: that of the
service travels in the launch token of a process, and the process reports its own with its port. Private keys stay where
they are made, so that nothing that Ray carries lets anyone read a connection or take part in it.
"""

from __future__ import annotations

import datetime
import io
import socket
import ssl
import tempfile
import threading
import time
from dataclasses import dataclass, field

from typing_extensions import Buffer, override

from tinsmith.errors import ConfigError

PIECE_BYTES = 1 << 18
"""Bytes that are encrypted, or received, at a time."""
_VALID = datetime.timedelta(days=3650)
"""Before and after its making: a certificate is known by its bytes, and clocks of machines differ."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A key pair and its self-signed certificate."""

    certificate: bytes
    """As DER; not secret."""
    key: bytes = field(repr=False)
    """As PEM, without a password."""

    @classmethod
    def new(cls) -> Identity:
        """A fresh pair on the curve P-256, in milliseconds. Raises ConfigError without `cryptography`."""
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise ConfigError(
                f"cluster.tls needs the package cryptography ({error}).", "pip install 'tinsmith[cluster]'"
            ) from error
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tinsmith")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _VALID)
            .not_valid_after(now + _VALID)
            .sign(key, hashes.SHA256())
        )
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return cls(certificate.public_bytes(serialization.Encoding.DER), pem)

    def context(self, peer: bytes, *, accepts: bool) -> ssl.SSLContext:
        """TLS 1.3 with this identity, and only with the owner of the certificate `peer`. `accepts`: as listener."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate itself is compared
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=peer)
        if accepts:
            context.num_tickets = 0  # nothing is resumed
        with tempfile.NamedTemporaryFile(prefix="tinsmith-tls-") as file:  # which only this user can read
            file.write(self.key + ssl.DER_cert_to_PEM_cert(self.certificate).encode())
            file.flush()
            context.load_cert_chain(file.name)
        return context


class TlsSocket:
    """A connected socket that speaks TLS, as the side that listens.

    One thread may receive while another sends, which `ssl.SSLSocket` does not allow: the state of TLS has a lock, and
    nobody holds it while waiting for the network.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._lock = threading.Lock()
        self._encrypted = memoryview(bytearray(PIECE_BYTES))

    def handshake(self, timeout_s: float) -> None:
        """Agree on keys. Raises OSError if the peer has another certificate, none, or is slow."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                self._tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                self._connection.sendall(self._outgoing.read())
            finally:
                if self._outgoing.pending:  # the end of the handshake, or an alert that says what is wrong
                    self._connection.sendall(self._outgoing.read())
            if not self._receive():
                raise ConnectionError("the peer closed the connection during the handshake")

    def settimeout(self, seconds: float | None) -> None:
        """As of a socket."""
        self._connection.settimeout(seconds)

    def recv(self, size: int) -> bytes:
        """At least one byte and at most `size`; nothing at the end."""
        data = bytearray(size)
        return bytes(data[: self.recv_into(data)])

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        """Receive at least one byte into a buffer; 0 at the end."""
        while True:
            with self._lock:
                try:
                    return self._tls.read(len(buffer), buffer)  # type: ignore[return-value]
                except ssl.SSLZeroReturnError:
                    return 0
                except ssl.SSLWantReadError:
                    pass
            if not self._receive():
                return 0

    def sendall(self, data: Buffer) -> None:
        """Send all of it. One thread at a time."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            with self._lock:
                self._tls.write(view[start : start + PIECE_BYTES])
                encrypted = self._outgoing.read()
            self._connection.sendall(encrypted)

    def makefile(self, mode: str, *, buffering: int) -> io.BufferedReader:
        """A file that reads from it. `mode` is "rb"."""
        assert mode == "rb"
        return io.BufferedReader(_Reading(self), buffering)

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()

    def _receive(self) -> bool:
        """Wait for encrypted bytes; whether there were any."""
        size = self._connection.recv_into(self._encrypted)
        with self._lock:
            self._incoming.write(self._encrypted[:size])
        return size > 0


class _Reading(io.RawIOBase):
    def __init__(self, connection: TlsSocket) -> None:
        self._from = connection

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Buffer) -> int:
        return self._from.recv_into(memoryview(buffer).cast("B"))
