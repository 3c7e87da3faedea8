"""Requests through two front ends: the same results, refusals and isolation as from one process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path

import httpx
import numpy as np
import pytest
import zstandard

from tests.service import test_isolation
from tests.service.openai.test_tool_calls_and_disconnects import HI, acted
from tests.service.support import inprocess
from tests.service.support.frontends import COUNT
from tests.service.support.inprocess import KEY, Api, Factory, api, loss_in, pass_body, until
from tinsmith.service.frontends import calls
from tinsmith.service.frontends.forwarder import SENT_BYTES

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COUNT, "2")


@pytest.mark.parametrize("route", ["POST /forward_backward", "POST /asample", "POST /retrieve_future"])
def test_ids_of_another_tenant_are_unknown(tmp_path: Path, route: str) -> None:
    """Fails if the core trusts what a front end has decoded, instead of the key of the request."""
    test_isolation.test_ids_of_another_tenant_are_unknown(tmp_path, route)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def _sampler(app: Api) -> str:
    session = (await app.post("create_session", {"tags": []})).json()["session_id"]
    request = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    return (await app.post("create_sampling_session", request)).json()["sampling_session_id"]


def test_passes_of_any_size_and_encoding_give_the_same_loss(tmp_path: Path) -> None:
    """Fails if the decompressed body is not what the journal gets (`plain` in `Forwarder._decode_pass`)."""
    tokens = [int(token) for token in np.random.default_rng(1).integers(5, 500, 12_000)]
    assert len(pass_body("x", 1, tokens)) > SENT_BYTES

    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            large, small = pass_body(model, 1, tokens), pass_body(model, 2, tokens[:50])
            losses = []
            for content, headers in (
                (large, {}),
                (small, {}),
                (zstandard.compress(pass_body(model, 3, tokens)), {"content-encoding": "zstd"}),
                (zstandard.compress(pass_body(model, 4, tokens[:50])), {"content-encoding": "zstd"}),
            ):
                promise = await app.send("POST", "/api/v1/forward_backward", content, **headers)
                assert promise.status_code == 200, promise.text
                losses.append(loss_in(await app.result(promise.json())))
            assert losses[:2] == losses[2:]
            assert losses[0] > losses[1] > 0
            again = await app.send("POST", "/api/v1/forward_backward", large)
            assert again.json() == {"request_id": f"{model}:1"}  # accepted before: nothing runs twice

    asyncio.run(main())


def test_samples_with_prompts_of_any_size(tmp_path: Path) -> None:
    seen: list[int] = []
    start = Factory()
    start.hook = lambda call, argument: seen.append(len(argument.prompt)) if call == "sample" else None  # type: ignore[attr-defined]

    async def main() -> None:
        async with api(tmp_path, start) as app:
            sampler = await _sampler(app)
            for number, length in enumerate((4, 30_000)):
                prompt = {"chunks": [{"type": "encoded_text", "tokens": [7] * length}]}
                body = {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "sampling_params": {}}
                body["sampling_params"] = {"max_tokens": 1}
                promise = await app.post("asample", body)
                assert (await app.result(promise.json())).status_code == 200
            refused = await app.post("asample", {"sampling_session_id": sampler, "seq_id": 3, "prompt": "x" * 70_000})
            assert refused.status_code == 400
            assert "prompt" in refused.json()["detail"]

    asyncio.run(main())
    assert seen == [4, 30_000]


@pytest.mark.parametrize("path", ["forward_backward", "asample", "create_session"])
def test_large_bodies_are_not_read_without_a_key(tmp_path: Path, path: str) -> None:
    """Fails if a front end reads a large body before the core wants it: the client sends none here."""

    async def main() -> None:
        async with api(tmp_path) as app:
            port = app.http.base_url.port
            assert port is not None
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST /api/v1/{path} HTTP/1.1\r\nhost: x\r\nx-api-key: tml-wrong\r\ncontent-length: 100000\r\n\r\n"
            writer.write(head.encode())
            assert b" 401 " in await asyncio.wait_for(reader.readline(), 120)
            await _close(writer)

    asyncio.run(main())


def test_bodies_over_the_limit_are_refused_with_front_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without the count of declared bytes: two bodies wait in front ends, and the core has none of them."""
    monkeypatch.setattr("tinsmith.service.limits.bodies.TENANT_BYTES", 250_000)

    async def main() -> None:
        async with api(tmp_path) as app:
            model, port = await app.model(), app.http.base_url.port
            assert port is not None
            head = f"POST /api/v1/forward_backward HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\n"
            head += "content-length: 100000\r\n\r\n"
            waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for _, writer in waiting:
                writer.write(head.encode())
            await until(lambda: app.service.bodies.held_bytes == 200_000)
            refused = await app.post("forward_backward", b" " * 100_000)
            assert refused.status_code == 429
            for _, writer in waiting:
                await _close(writer)
            await until(lambda: app.service.bodies.held_bytes == 0)
            promise = await app.post("forward_backward", pass_body(model, 1, [7] * 8000))
            assert promise.status_code == 200

    asyncio.run(main())


def test_uploads_and_downloads_pass_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without `PartWritten`: the download stops after UNWRITTEN_PARTS parts."""

    async def echo(scope, receive, send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-query", scope["query_string"])]})
        for start in range(0, len(body), 50_000):
            await send({"type": "http.response.body", "body": body[start : start + 50_000], "more_body": True})
        await send({"type": "http.response.body"})

    monkeypatch.setattr(calls, "UNWRITTEN_PARTS", 1)
    monkeypatch.setattr(inprocess, "create_app", lambda service: echo)
    content = os.urandom(600_000)

    async def parts():
        for start in range(0, len(content), 70_000):
            yield content[start : start + 70_000]

    async def main() -> None:
        async with api(tmp_path) as app:
            answer = await app.http.post("/anything?q=1", content=content)
            assert (answer.status_code, answer.headers["x-query"], answer.content == content) == (201, "q=1", True)
            assert (await app.http.post("/anything", content=parts())).content == content

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_reaches_the_engine(tmp_path: Path, stream: bool) -> None:
    """Fails without `Exchange._watch_client`: the core waits for the sample of a client that has gone."""

    async def main() -> None:
        async with acted(tmp_path, [None]) as (served, actor, _):
            body = json.dumps({"model": "toy", "messages": HI, "stream": stream}).encode()
            port = served.http.base_url.port
            assert port is not None
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            await asyncio.wait_for(actor.began.wait(), 120)
            await _close(writer)
            await asyncio.wait_for(actor.ended.wait(), 120)
            assert actor.cancelled == [actor.requests[0].request_id]

    asyncio.run(main())


def test_failure_after_the_start_closes_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without ResponseAborted: the client waits for the rest forever."""

    async def broken(scope, receive, send) -> None:
        if scope["path"] == "/late":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        raise ValueError

    monkeypatch.setattr(inprocess, "create_app", lambda service: broken)

    async def main() -> None:
        async with api(tmp_path) as app:
            assert (await app.http.get("/early")).status_code == 500
            with pytest.raises(httpx.RemoteProtocolError):
                await app.http.get("/late")

    asyncio.run(main())


def test_connections_of_an_address_count_in_all_front_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without `RefuseConnection`: each front end alone has fewer connections than the limit."""
    monkeypatch.setattr("tinsmith.service.limits.connections._is_loopback", lambda address: False)

    async def main() -> None:
        async with api(tmp_path, connections_per_address=6) as app:
            counts, port = app.service.connections, app.http.base_url.port
            for _ in range(2):  # closed connections no longer count
                opened = [socket.create_connection(("127.0.0.1", port), timeout=120) for _ in range(6)]
                await until(lambda: len(counts) == 6)
                with socket.create_connection(("127.0.0.1", port), timeout=120) as refused:
                    head = await asyncio.to_thread(refused.recv, 4096)
                    assert b" 429 " in head
                for connection in opened:
                    connection.close()
                await until(lambda: len(counts) == 0)
            assert "tinsmith_http_connections 1" in (await app.http.get("/metrics")).text

    asyncio.run(main())
