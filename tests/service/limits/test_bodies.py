"""Limits of bodies: each route has its own, and a large body does not stop other requests."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.service.conftest import Served
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded
from tinsmith.service.limits.bodies import SMALL_BYTES, prompt_limit

pytestmark = pytest.mark.usefixtures("forked_programs")

MIB = 2**20
CONTEXT = 32_768


@pytest.fixture(scope="module")
def served(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("bodies")
    with embedded(ServeConfig(models=(f"tiny={tiny_llama}", "toy"), engine="fake", data=data)) as (url, key):
        made = Served(url, key, data)
        with made.raw() as call:  # loads the tokenizer
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
            assert call(f"{url}/v1/completions", body).status_code == 200
        yield made


@pytest.fixture
def sampler(served: Served) -> str:
    with served.raw() as call:
        session = call("create_session", {}).json()["session_id"]
        request = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
        return call("create_sampling_session", request).json()["sampling_session_id"]


BUSY_SECONDS = 0.8
"""A response may take this long while other tests keep both cores busy; a loop that stands still takes seconds."""
ATTEMPTS = 4
"""The machine may stand still during some of them."""


@contextmanager
def watched(served: Served) -> Iterator[list[float]]:
    """Durations of healthz requests, one after another, during the block."""
    seconds: list[float] = []
    started, stop = threading.Event(), threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=served.url, timeout=240) as http:
            http.get("/api/v1/healthz")  # opens the connection
            started.set()
            while not (seconds and stop.is_set()):
                began = time.monotonic()
                assert http.get("/api/v1/healthz").status_code == 200
                seconds.append(time.monotonic() - began)
                stop.wait(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    started.wait(240)
    try:
        yield seconds
    finally:
        stop.set()
        thread.join()


def assert_others_are_served(served: Served, request: Callable[[], None]) -> None:
    """Most responses to others are fast during a request, at one of the attempts at least."""
    slow: list[float] = []
    for _ in range(ATTEMPTS):
        with watched(served) as seconds:
            request()
        if float(np.quantile(seconds, 0.9)) < BUSY_SECONDS:
            return
        slow.append(float(np.quantile(seconds, 0.9)))
    raise AssertionError(f"Others wait for {slow} s")


def refused_at_once(call: Callable[[], httpx.Response], status: int = 413) -> str:
    response = call()
    assert response.status_code == status, response.text
    return response.text


def send_raw(served: Served, head: str, body: bytes) -> tuple[int, str]:
    """Status and text of the response to what a plain socket sends: Python's lock is free meanwhile, for `watched`."""
    port = int(served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=240) as connection:
        connection.sendall(f"POST {head}\r\nhost: x\r\nx-api-key: {served.key}\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):
            connection.sendall(body)
        response = HTTPResponse(connection)
        response.begin()
        return response.status, response.read().decode()


@pytest.mark.parametrize("declared", [True, False])
def test_oversized_prompt_is_refused_while_others_are_served(served: Served, sampler: str, declared: bool) -> None:
    """Fails if asample reads its body without `prompt_limit`."""
    tokens = b"12345," * (160 * MIB // 6)
    body = b'{"sampling_session_id": "%b", "prompt": {"chunks": [{"tokens": [' % sampler.encode() + tokens + b"1]}]}}"
    length = f"content-length: {len(body)}" if declared else "transfer-encoding: chunked"
    if not declared:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)

    def request() -> None:
        status, _ = send_raw(served, f"/api/v1/asample HTTP/1.1\r\n{length}", body)
        assert status == 413

    assert_others_are_served(served, request)


def test_largest_prompt_is_parsed_without_delay(served: Served, sampler: str) -> None:
    """Fails if `decode_sample` runs in a thread: the parser holds Python's lock."""
    size = prompt_limit(CONTEXT) - 1000
    prompt = {"chunks": [{"tokens": [12345] * (size // 7)}]}
    body = json.dumps({"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt}).encode()

    def request() -> None:
        with served.raw() as call:
            answer = call("asample", body)
        assert answer.status_code == 400
        assert "does not fit" in answer.json()["detail"]

    assert_others_are_served(served, request)


@pytest.mark.parametrize("megabytes", [1, 8])
def test_large_chats_do_not_delay_others(served: Served, megabytes: int) -> None:
    """Fails without the comparison with `least_tokens`: the tokenizer would work for seconds."""
    text = "The quick brown fox jumps over the lazy dog. " * (megabytes * 1_000_000 // 45)
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 1}

    def request() -> None:
        with served.raw() as call:
            answer = call(f"{served.url}/v1/chat/completions", body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")

    assert_others_are_served(served, request)


def test_tokenization_does_not_delay_others(served: Served) -> None:
    """Fails if the tokenizer's `encode` takes the place of `encode_batch`, which releases Python's lock."""
    text = "The quick brown fox jumps over the lazy dog. " * 8000  # too short to be refused by its length

    def request() -> None:
        with served.raw() as call:
            answer = call(f"{served.url}/v1/completions", {"model": "tiny", "prompt": [text] * 4, "max_tokens": 1})
        assert answer.status_code == 400
        assert "the prompt has" in answer.json()["error"]["message"]

    assert_others_are_served(served, request)


def test_nested_values_do_not_delay_others(served: Served) -> None:
    """Fails without MAX_VALUES: a million lists would come back from the process that parses."""
    nested = b"[" + b"[]," * 1_000_000 + b"1]"
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": %b}]}' % nested

    def request() -> None:
        status, text = send_raw(served, f"/v1/chat/completions HTTP/1.1\r\ncontent-length: {len(body)}", body)
        assert status == 413
        assert "The body holds over" in text

    assert_others_are_served(served, request)


@pytest.mark.parametrize("path", ["create_session", "optim_step", "retrieve_future", "weights_info", "save_weights"])
def test_other_bodies_are_small(served: Served, path: str) -> None:
    with served.raw() as call:
        text = refused_at_once(lambda: call(path, b" " * (SMALL_BYTES + 1)))
    assert f"at most {SMALL_BYTES}" in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("display_name", "a" * 257),
        ("project_id", "a" * 257),
        ("tags", ["a"] * 257),
        ("tags", ["a" * 257]),
        ("user_metadata", {"key": "a" * 65_536}),
    ],
)
def test_names_of_a_session_are_bounded(served: Served, field: str, value: object) -> None:
    with served.raw() as call:
        refused = call("create_session", {field: value})
        assert refused.status_code == 400
        assert field in refused.json()["detail"]


def test_idempotency_key_is_bounded(served: Served) -> None:
    with served.raw() as call:
        for length, status in ((256, 200), (257, 400)):
            assert call("create_session", {}, headers={"X-Idempotency-Key": "a" * length}).status_code == status


def test_long_detail_of_a_session_is_cut(served: Served) -> None:
    with served.raw() as call:
        session = call("create_session", {}).json()["session_id"]
        body = {"reason": {"type": "errored"}, "detail": "a" * 100_000}
        assert call(f"sessions/{session}/finish", body).status_code == 204
        sessions = call("sessions/search", {"session_id": session}).json()["sessions"]
        assert len(sessions[0]["status"]["detail"]) == 4096


def test_open_sessions_of_a_tenant_are_limited(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import asyncio

    from tests.service.support.inprocess import api

    monkeypatch.setattr("tinsmith.service.sessions.MAX_OPEN_SESSIONS", 3)

    async def main() -> None:
        async with api(tmp_path) as app:
            other = await app.tenant("other")
            answers = [await app.post("create_session", {}) for _ in range(4)]
            assert [answer.status_code for answer in answers] == [200, 200, 200, 403]
            assert (await other.post("create_session", {})).status_code == 200
            assert (await app.post(f"sessions/{answers[0].json()['session_id']}/finish", {})).status_code == 204
            assert (await app.post("create_session", {})).status_code == 200

    asyncio.run(main())


def test_bodies_of_a_tenant_are_limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails without the comparison with TENANT_BYTES. Bytes count until the request is answered."""
    import asyncio

    from tests.service.support.inprocess import api, pass_body

    monkeypatch.setattr("tinsmith.service.limits.bodies.TENANT_BYTES", 100_000)

    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            refused = await app.post("forward_backward", b" " * 100_001)
            assert refused.status_code == 429
            assert app.service.bodies.held_bytes == 0
            assert (await app.post("forward_backward", pass_body(model, 1))).status_code == 200
            assert (await app.post("forward_backward", b"nonsense")).status_code == 400
            assert app.service.bodies.held_bytes == 0

    asyncio.run(main())
