"""TLS of connections to the processes of a cluster: who may connect, and what travels."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from tinsmith.engine.base import SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.processes import client, dial, slots
from tinsmith.engine.processes.client import start_engine
from tinsmith.engine.processes.dial import Address, LaunchToken, Listener
from tinsmith.engine.processes.slots import ChildProcess, LocalSlots
from tinsmith.engine.processes.tls import PIECE_BYTES, Identity, TlsSocket
from tinsmith.errors import EngineDied

pytest.importorskip("cryptography")

SERVICE, STRANGER = Identity.new(), Identity.new()
TOKEN = LaunchToken.new(1, "127.0.0.1", identity=SERVICE)
SECRET = b"what the client said"


class Process:
    """A process that sends back what it receives, in a thread."""

    def __init__(self) -> None:
        self.listener = Listener(TOKEN)
        assert self.listener.identity is not None
        self.address = Address("127.0.0.1", self.listener.port, self.listener.identity.certificate)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        connection = self.listener.accept()
        while data := connection.recv(PIECE_BYTES):
            connection.sendall(data)
        connection.close()


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    asyncio.run(_say(process.address))  # it still takes the service, which ends it


async def _say(address: Address, identity: Identity | None = SERVICE, data: bytes = SECRET) -> bytes:
    reader, writer = await dial.dial(address, TOKEN, identity, buffer=1 << 16)
    writer.write(data)
    answer = await reader.readexactly(len(data))
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return answer


def test_nothing_readable_travels() -> None:
    """Fails if the process or the service leaves out TLS."""
    process, seen = Process(), bytearray()

    async def run() -> bytes:
        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                seen.extend(data)
                writer.write(data)
            writer.close()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            further = await asyncio.open_connection("127.0.0.1", process.address.port)
            await asyncio.gather(pass_on(reader, further[1]), pass_on(further[0], writer))

        async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await _say(Address("127.0.0.1", port, process.address.certificate))

    assert asyncio.run(run()) == SECRET
    assert len(seen) > 4 * len(SECRET)
    assert SECRET not in seen
    assert TOKEN.secret not in seen


@pytest.mark.parametrize("identity", [STRANGER, None], ids=["another certificate", "no TLS"])
def test_process_takes_the_service_only(
    identity: Identity | None, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a process does not ask for a certificate, or takes a connection without TLS. The token is right."""
    if identity is None:  # both wait for the other to begin
        monkeypatch.setattr(dial, "HANDSHAKE_S", 0.5)
    with pytest.raises(EngineDied, match="is not the process started"):
        asyncio.run(_say(process.address, identity))


def test_service_takes_the_process_only(process: Process) -> None:
    """Fails if the service does not compare the certificate that the process has reported."""
    with pytest.raises(EngineDied, match="is not the process started"):
        asyncio.run(_say(Address("127.0.0.1", process.address.port, STRANGER.certificate)))


def test_process_without_tls_is_refused() -> None:
    plain = Listener(LaunchToken.new(1, "127.0.0.1"))
    threading.Thread(target=plain.accept, daemon=True).start()
    with pytest.raises(EngineDied, match="is not the process started"):
        asyncio.run(_say(Address("127.0.0.1", plain.port, STRANGER.certificate)))


def test_both_directions_at_once() -> None:
    """Fails if a thread that waits for the network holds the lock of TLS."""
    ours, theirs = socket.socketpair()
    accepting = TlsSocket(theirs, STRANGER.context(SERVICE.certificate, accepts=True))
    shaking = threading.Thread(target=accepting.handshake, args=(120,))
    shaking.start()

    async def run() -> bytes:
        context = SERVICE.context(STRANGER.certificate, accepts=False)
        reader, writer = await asyncio.open_connection(sock=ours, ssl=context, server_hostname="", limit=1 << 20)
        await asyncio.to_thread(shaking.join)
        accepting.settimeout(120)
        sending = threading.Thread(target=accepting.sendall, args=(b"b" * size,))
        received = bytearray()
        reading = threading.Thread(
            target=lambda: received.extend(accepting.makefile("rb", buffering=1 << 20).read(size))
        )
        reading.start()
        sending.start()  # while the other thread waits for the first byte
        sent = await reader.readexactly(size)
        writer.write(b"a" * size)
        await writer.drain()
        await asyncio.to_thread(reading.join)
        assert received == b"a" * size
        writer.close()
        return sent

    size = 3 * PIECE_BYTES + 5
    assert asyncio.run(run()) == b"b" * size
    accepting.close()


def test_data_that_arrives_during_the_close_is_no_error() -> None:
    """Fails if the end of a connection raises: a process sends heartbeats until its connection closes."""
    listener = Listener(TOKEN)
    assert listener.identity is not None
    certificate = listener.identity.certificate

    def send() -> None:
        connection = listener.accept()
        with suppress(OSError):
            while True:
                connection.sendall(b"x" * 1000)

    threading.Thread(target=send, daemon=True).start()

    async def run() -> None:
        address = Address("127.0.0.1", listener.port, certificate)
        reader, writer = await dial.dial(address, TOKEN, SERVICE, buffer=1 << 16)
        await reader.readexactly(1000)
        async with asyncio.timeout(120):
            await client._close(writer)

    asyncio.run(run())


def test_calls_of_a_killed_process_with_tls_fail_as_others_do(wait: Any) -> None:
    async def run() -> None:
        machines = LocalSlots(Identity.new())
        (slot,) = await machines.reserve(1, name="worker")
        engine = await start_engine(slot, EngineConfig(source="fake", kind="fake"), "fake", 1)

        async def call_on() -> None:
            while True:
                await engine.cancel("nothing")

        calls = [asyncio.create_task(call_on()) for _ in range(20)]
        await asyncio.sleep(0.1)
        os.kill(engine.pid, signal.SIGKILL)
        async with asyncio.timeout(120):
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            await engine.close()
        assert {type(outcome) for outcome in outcomes} == {EngineDied}
        await machines.close()

    wait(run())


def test_engine_in_a_slot_with_tls(wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[tuple[Address, LaunchToken]] = []

    async def observed(address: Address, token: LaunchToken, identity: Identity, buffer: int) -> Any:
        dialled.append((address, token))
        return await dial.dial(address, token, identity, buffer)

    async def run() -> None:
        machines = LocalSlots(Identity.new())
        (slot,) = await machines.reserve(1, name="worker")
        config = EngineConfig(source="fake", kind="fake")
        engine = await start_engine(slot, config, "fake", 1)
        request = SampleRequest(request_id="r", prompt=np.array([1, 2], np.int32), max_tokens=5, seed=1)
        local = await FakeEngine(config).sample(request)
        np.testing.assert_array_equal((await engine.sample(request)).sequences[0].tokens, local.sequences[0].tokens)
        assert isinstance(slot.process, ChildProcess)
        ((address, token),) = dialled
        assert b"" not in (address.certificate, token.certificate)
        assert address.certificate != token.certificate
        async with asyncio.timeout(120):
            await engine.close()
        assert slot.process.code == 0  # by itself, when its connection closed
        await machines.close()

    monkeypatch.setattr(slots, "dial", observed)
    wait(run())
