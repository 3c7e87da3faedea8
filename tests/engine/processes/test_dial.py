"""The handshake of connections between the service and the processes of a cluster."""

from __future__ import annotations

import asyncio
import io
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from tinsmith.engine.processes import dial
from tinsmith.engine.processes.dial import Address, LaunchToken, Listener, encode_launch_token, read_launch_token
from tinsmith.errors import EngineDied

TOKEN = LaunchToken.new(7, "127.0.0.1")


class Process:
    """The process's half, in a thread: sends back what it receives."""

    def __init__(self) -> None:
        self.listener = Listener(TOKEN)
        self.address = Address("127.0.0.1", self.listener.port)
        self.connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection = self.listener.accept()
        assert isinstance(connection, socket.socket)
        self.connections.append(connection)
        while data := connection.recv(100):
            connection.sendall(data)


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    asyncio.run(exchange(process))  # ends it, if it was not ended


async def exchange(process: Process, launch_token: LaunchToken = TOKEN) -> bytes:
    if process.connections:
        return b""
    reader, writer = await dial.dial(process.address, launch_token, buffer=100)
    connection = writer.get_extra_info("socket")
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.write(b"ping")
    answer = await reader.readexactly(4)
    writer.close()
    await writer.wait_closed()
    return answer


def test_token_and_generation_open_a_connection(process: Process) -> None:
    assert asyncio.run(exchange(process)) == b"ping"
    assert process.connections[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    "change", [{"secret": b"x" * 32}, {"generation": 6}, {"generation": 8}], ids=["token", "older", "newer"]
)
def test_other_tokens_are_refused_and_the_right_one_still_works(change: Any, process: Process) -> None:
    with pytest.raises(EngineDied, match="refused the token"):
        asyncio.run(exchange(process, replace(TOKEN, **change)))
    assert not process.connections
    assert asyncio.run(exchange(process)) == b"ping"


def test_nothing_is_unpickled_before_the_handshake(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("unpickled"))
    with socket.create_connection((process.address.host, process.address.port)) as stranger:
        assert len(stranger.recv(100)) == dial.TOKEN_BYTES
        stranger.sendall(pickle.dumps(print) * 20)
        assert _ends(stranger)


def test_silent_connections_do_not_delay_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a handshake begins only when the one before has ended."""
    monkeypatch.setattr(dial, "HANDSHAKE_S", 600)
    process = Process()
    with ExitStack() as strangers:
        for _ in range(3):
            silent = strangers.enter_context(socket.create_connection((process.address.host, process.address.port)))
            assert len(silent.recv(100)) == dial.TOKEN_BYTES
        assert asyncio.run(exchange(process)) == b"ping"


def test_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "HANDSHAKE_S", 0.2)
    process = Process()
    with socket.create_connection((process.address.host, process.address.port)) as silent:
        assert len(silent.recv(100)) == dial.TOKEN_BYTES
        assert _ends(silent)
    monkeypatch.undo()
    assert asyncio.run(exchange(process)) == b"ping"


def test_process_without_the_token_is_refused() -> None:
    async def run(answer: Callable[[Any], None]) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"n" * dial.TOKEN_BYTES)
            await reader.readexactly(8 + 32 + 32)
            answer(writer)
            await reader.read()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
            await dial.dial(address, TOKEN, buffer=100)

    with pytest.raises(EngineDied, match="another token"):
        asyncio.run(run(lambda writer: writer.write(b"p" * 32)))


def test_unreachable_process_is_an_engine_that_died() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody else can listen on this port
        with pytest.raises(EngineDied, match="cannot be reached"):
            asyncio.run(dial.dial(Address("127.0.0.1", bound.getsockname()[1]), TOKEN, buffer=100))


def test_launch_token_is_read_as_written() -> None:
    launch_token = replace(TOKEN, payload=b"payload")
    assert read_launch_token(io.BytesIO(encode_launch_token(launch_token))) == launch_token


def _ends(connection: socket.socket) -> bool:
    connection.settimeout(120)
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True
