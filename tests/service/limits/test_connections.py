"""Raw connections: what a client may send, and how long it may take."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn

from tests.service.support.inprocess import until
from tests.service.support.process import LIMIT_S, Child, child, eventually, free_port
from tinsmith.service.config import ServeConfig
from tinsmith.service.limits.connections import (
    HEADER_BYTES,
    HEADERS,
    PIPELINED,
    BoundedProtocol,
    Connections,
)

pytestmark = pytest.mark.usefixtures("forked_programs")

KEY = "tml-x"
TIMEOUT_S = 1.0
HOLD_S = 44.0
"""The longest time for which a poll may be held."""
HEAD = f"POST /api/v1/create_session HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\n"


@contextlib.contextmanager
def service(data: Path, timeout_s: float) -> Iterator[Child]:
    options: dict[str, Any] = {"engine": "fake", "api_key": KEY, "request_timeout_s": timeout_s, "hold_s": HOLD_S}
    with child(ServeConfig(models=("toy",), data=data, port=free_port(), **options)) as running:
        yield running
        assert healthz(running) < 5.0
        assert "Traceback" not in (data / "log").read_text()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """A service whose clients have one second for a request."""
    with service(tmp_path_factory.mktemp("limits"), TIMEOUT_S) as running:
        yield running


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """A service whose clients have as long as they need."""
    with service(tmp_path_factory.mktemp("patient"), 600.0) as running:
        yield running


def healthz(served: Child) -> float:
    """Seconds until healthz has answered: the least of three, since the machine may stand still."""
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        assert httpx.get(f"{served.url}/api/v1/healthz", timeout=LIMIT_S).status_code == 200
        seconds.append(time.monotonic() - began)
    return min(seconds)


def connect(served: Child) -> socket.socket:
    port = int(served.url.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)


def sampler_of(http: httpx.Client) -> str:
    """A sampling session."""
    session = _posted(http, "/create_session", {})["session_id"]
    request = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    return _posted(http, "/create_sampling_session", request)["sampling_session_id"]


def _posted(http: httpx.Client, path: str, body: dict) -> Any:
    """The answer. A request during which the machine stands still may come too late: it is repeated."""
    while (answer := http.post(path, json=body)).status_code == 408:
        pass
    assert answer.status_code == 200, answer.text
    return answer.json()


def answer(connection: socket.socket) -> tuple[int, str]:
    """(status, body) of the response after which the connection ends; (0, "") if it ends without."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            received += data
    head, _, body = received.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body.decode()


def send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        connection.sendall(data)


def test_header_line_without_end_is_refused(patient: Child) -> None:
    """Fails without `_refuse(_headers_too_large())` in `data_received`: the parser collects the whole line."""
    memory = psutil.Process(patient.popen.pid).memory_info
    before = memory().rss
    with connect(patient) as connection:
        send(connection, HEAD.encode() + b"x-long: ")
        for _ in range(148):
            send(connection, b"a" * (1 << 20))
        assert answer(connection)[0] in (431, 0)  # 0: the reset came before the response was read
    assert memory().rss - before < 32 << 20


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HEAD + "x-long: " + "a" * HEADER_BYTES + "\r\n\r\n", 431),
        (HEAD + "".join(f"x-{number}: 1\r\n" for number in range(HEADERS)) + "\r\n", 431),
        (f"GET /{'a' * HEADER_BYTES} HTTP/1.1\r\n\r\n", 431),
        ("NONSENSE\r\n\r\n", 400),
        (HEAD + "transfer-encoding: chunked\r\n\r\n1;" + "a" * 8 * HEADER_BYTES, 431),
        (HEAD + "transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-trailer: " + "a" * 8 * HEADER_BYTES, 431),
    ],
)
def test_oversized_heads_are_refused(patient: Child, head: str, status: int) -> None:
    with connect(patient) as connection:
        send(connection, head.encode())
        seen, body = answer(connection)
    assert seen == status
    assert json.loads(body)["detail"]


def test_largest_allowed_head_is_served(patient: Child) -> None:
    with connect(patient) as connection:
        many = "".join(f"x-{number}: {'a' * 400}\r\n" for number in range(HEADERS - 5))
        send(connection, f"{HEAD}{many}connection: close\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        assert answer(connection)[0] == 200


@pytest.mark.parametrize("start", ["", "\r\n\r\n", "GET", HEAD, HEAD + "content-length: 100\r\n\r\n{"])
def test_slow_requests_end_after_the_time_limit(served: Child, start: str) -> None:
    """Fails without the call of `check_time` in `Connections._check`."""
    began = time.monotonic()
    with connect(served) as connection:
        send(connection, start.encode())
        status, _ = answer(connection)
    assert status == (408 if start.strip() else 0)
    assert time.monotonic() - began > TIMEOUT_S * 0.9


def test_header_bytes_do_not_extend_the_time_limit(served: Child) -> None:
    """The time limit ends the request, not the number of headers."""
    with connect(served) as connection:
        send(connection, HEAD.encode())
        connection.settimeout(0.2)
        received = None
        for _ in range(HEADERS // 2):
            send(connection, b"x: 1\r\n")
            with contextlib.suppress(TimeoutError):
                received = _received(connection)
                break
    assert received is not None
    assert b" 408 " in received or not received  # a reset, for bytes that the server did not read


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionError:
        return b""


def test_body_at_the_minimum_rate_is_served(served: Child) -> None:
    """A body that takes three times as long as the headers may. It comes too late if the machine stands still, but not
    each time."""
    assert 200 in (_status_of_slow_body(served) for _ in range(10))


def _status_of_slow_body(served: Child) -> int:
    body = json.dumps({"unread": "a" * 120_000}).encode()
    with connect(served) as connection:
        send(connection, f"{HEAD}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        for at in range(0, len(body), 10_000):
            send(connection, body[at : at + 10_000])
            time.sleep(0.25)
        return answer(connection)[0]


def test_long_poll_outlives_the_time_limit(served: Child) -> None:
    with httpx.Client(base_url=f"{served.url}/api/v1", headers={"X-API-Key": KEY}, timeout=LIMIT_S) as http:
        sampler = sampler_of(http)
        began = time.monotonic()
        target = {"target": {"sampling_session_id": sampler}, "timeout": 3 * TIMEOUT_S}
        assert _posted(http, "/retrieve_futures", target)["completions"] == []
        assert time.monotonic() - began > 2.9 * TIMEOUT_S
        assert http.get("/healthz").status_code == 200  # on the same connection


def test_half_open_requests_do_not_delay_others(served: Child) -> None:
    before = psutil.Process(served.popen.pid).memory_info().rss
    with contextlib.ExitStack() as stack:
        half_open = [stack.enter_context(connect(served)) for _ in range(5000)]
        for connection in half_open:
            send(connection, HEAD.encode())
        assert healthz(served) < 5.0  # after 5,000 connections are accepted
        assert psutil.Process(served.popen.pid).memory_info().rss - before < 200 << 20
        for connection in half_open:
            answer(connection)
    eventually(lambda: len(psutil.Process(served.popen.pid).net_connections()) < 100)


def test_refused_body_is_answered_before_it_is_sent(served: Child) -> None:
    with connect(served) as connection:
        send(connection, f"{HEAD}content-length: {160 << 20}\r\n\r\n".encode())
        received = b""
        while not received.endswith(b"}"):
            received += connection.recv(1 << 16)
        assert b" 413 " in received.partition(b"\r\n")[0]
        assert answer(connection) == (0, "")  # the rest of the body does not arrive


async def _count(port: int, requests: int) -> list[int]:
    """Statuses of `requests` connections that stay open, one request on each."""
    statuses, writers = [], []
    for _ in range(requests):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        statuses.append(int((await reader.readline()).split()[1]))
    for writer in writers:
        writer.close()
    return statuses


@pytest.mark.parametrize(("address", "refused"), [("127.0.0.1", 0), ("203.0.113.7", 2)])
def test_connections_of_an_address_are_limited(monkeypatch: pytest.MonkeyPatch, address: str, refused: int) -> None:
    """Fails without the refusal in `Connections.add`. Clients get another address: tests have only loopback."""
    monkeypatch.setattr("uvicorn.protocols.http.httptools_impl.get_remote_addr", lambda transport: (address, 1))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def main() -> None:
        connections = Connections(4, 60)
        protocol: Any = partial(BoundedProtocol, connections=connections)
        config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server._serve([listener]))
            await until(lambda: server.started)
            for _ in range(2):  # closed connections no longer count
                assert await _count(listener.getsockname()[1], 6) == [200] * (6 - refused) + [429] * refused
                await until(lambda: not len(connections))
            server.should_exit = True
            await serving

    asyncio.run(main())


def test_pipelined_requests_are_limited(patient: Child) -> None:
    """Fails without the comparison with PIPELINED: each would wait in memory for the poll."""
    with httpx.Client(base_url=f"{patient.url}/api/v1", headers={"X-API-Key": KEY}, timeout=LIMIT_S) as http:
        sampler = sampler_of(http)
    poll = json.dumps({"target": {"sampling_session_id": sampler}, "timeout": HOLD_S}).encode()
    head = f"POST /api/v1/retrieve_futures HTTP/1.1\r\nx-api-key: {KEY}\r\ncontent-length: {len(poll)}\r\n\r\n".encode()
    began = time.monotonic()
    with connect(patient) as connection:
        send(connection, head + poll + b"GET /api/v1/healthz HTTP/1.1\r\n\r\n" * (PIPELINED + 2))
        answer(connection)
    assert time.monotonic() - began < HOLD_S - 4
