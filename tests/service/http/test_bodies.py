"""Bodies of any size and encoding over HTTP: decoded to the same content, counted, and not read without a key."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest
import zstandard

from tests.service.support.inprocess import KEY, Api, Factory, api, loss_in, pass_body, until
from tinsmith.service.concurrency import LARGE_BYTES


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def _sampler(app: Api) -> str:
    session = (await app.post("create_session", {"tags": []})).json()["session_id"]
    request = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    return (await app.post("create_sampling_session", request)).json()["sampling_session_id"]


def test_passes_of_any_size_and_encoding_give_the_same_loss(tmp_path: Path) -> None:
    """Fails if the decompressed body is not what the journal gets (`plain` in `routes.training`)."""
    tokens = [int(token) for token in np.random.default_rng(1).integers(5, 500, 12_000)]
    assert len(pass_body("x", 1, tokens)) > LARGE_BYTES

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
            refused = await app.post("forward_backward", large[:-5])
            assert (refused.status_code, refused.json()["category"]) == (400, "user")

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
                body = {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt}
                promise = await app.post("asample", {**body, "sampling_params": {"max_tokens": 1}})
                assert (await app.result(promise.json())).status_code == 200
            refused = await app.post("asample", {"sampling_session_id": sampler, "seq_id": 3, "prompt": "x" * 70_000})
            assert refused.status_code == 400
            assert "prompt" in refused.json()["detail"]

    asyncio.run(main())
    assert seen == [4, 30_000]


@pytest.mark.parametrize("path", ["forward_backward", "asample", "create_session"])
def test_bodies_are_not_read_without_a_key(tmp_path: Path, path: str) -> None:
    """Fails if a body is received before the key is checked: the client sends none here."""

    async def main() -> None:
        async with api(tmp_path, over_http=True) as app:
            reader, writer = await asyncio.open_connection("127.0.0.1", app.http.base_url.port)
            head = f"POST /api/v1/{path} HTTP/1.1\r\nhost: x\r\nx-api-key: tml-wrong\r\ncontent-length: 100000\r\n\r\n"
            writer.write(head.encode())
            assert b" 401 " in await asyncio.wait_for(reader.readline(), 120)
            await _close(writer)

    asyncio.run(main())


def test_bodies_count_before_they_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without the count of declared bytes: two bodies are awaited, and nothing of them is here."""
    monkeypatch.setattr("tinsmith.service.limits.bodies.TENANT_BYTES", 250_000)

    async def main() -> None:
        async with api(tmp_path, over_http=True) as app:
            model, port = await app.model(), app.http.base_url.port
            head = f"POST /api/v1/forward_backward HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\n"
            head += "content-length: 100000\r\n\r\n"
            waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for _, writer in waiting:
                writer.write(head.encode())
            await until(lambda: app.service.bodies.held_bytes == 200_000)
            assert (await app.post("forward_backward", b" " * 100_000)).status_code == 429
            for _, writer in waiting:
                await _close(writer)
            await until(lambda: app.service.bodies.held_bytes == 0)
            assert (await app.post("forward_backward", pass_body(model, 1, [7] * 8000))).status_code == 200

    asyncio.run(main())
