"""A run says what its requests wait for while the server serves other tenants, on the virtual clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import httpx
import pytest

from tinsmith.rl.policy.queue_notice import QueueNotice
from tinsmith.rl.policy.server_watch import ServerWatch
from tinsmith.testing import run_virtually

WAIT = "after 2 requests of other tenants"


def lines_of(
    caplog: pytest.LogCaptureFixture, answer: Callable[[float], httpx.Response], seconds: float
) -> tuple[list[tuple[float, str]], list[httpx.Request]]:
    """(time, text) of each line within `seconds` of a server that answers so, and the requests for the queue."""
    times, requests = list[float](), list[httpx.Request]()

    async def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("healthz"):
            return httpx.Response(200)
        requests.append(request)
        return answer(asyncio.get_running_loop().time())

    async def main() -> None:
        watch = ServerWatch()
        watch.attend("http://server", queue=QueueNotice("s1", "tml-key"))
        async with watch.watching():
            while (now := asyncio.get_running_loop().time()) < seconds:
                times.extend([now] * (len(caplog.messages) - len(times)))
                await asyncio.sleep(1.0)

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        client = partial(httpx.AsyncClient, transport=httpx.MockTransport(respond))
        patch.setattr("tinsmith.rl.policy.server_watch.httpx.AsyncClient", client)
        run_virtually(main())
    return list(zip(times, caplog.messages, strict=True)), requests


def waits(seconds: float) -> httpx.Response:
    return httpx.Response(200, json={"waits": [{"queue": "sampling", "waited_s": seconds, "reason": WAIT}]})


def test_long_wait_is_logged_at_growing_distances(caplog: pytest.LogCaptureFixture) -> None:
    lines, requests = lines_of(caplog, waits, 1500.0)
    assert lines[3][1] == f"Waiting for the server for 2:30 min: sampling, {WAIT}"
    assert [round(time, -1) for time, _ in lines] == [10, 30, 70, 150, 310, 610, 910, 1210]
    assert {str(request.url) for request in requests} == {"http://server/api/v1/sessions/s1/queue"}
    assert requests[0].headers["x-api-key"] == "tml-key"


def test_short_waits_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(caplog, lambda now: waits(now % 9), 300.0)[0] == []


def test_wait_after_a_pause_is_logged_soon_again(caplog: pytest.LogCaptureFixture) -> None:
    lines, _ = lines_of(caplog, lambda now: waits(0.0 if 320 < now < 1100 else now), 1200.0)
    assert [round(time, -1) for time, _ in lines][-4:] == [310, 1100, 1120, 1160]


@pytest.mark.parametrize("answer", [httpx.Response(404), httpx.Response(401)])
def test_other_servers_get_one_request(caplog: pytest.LogCaptureFixture, answer: httpx.Response) -> None:
    lines, requests = lines_of(caplog, lambda _: answer, 100.0)
    assert (lines, len(requests)) == ([], 1)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"waits": 3}'])
def test_answers_without_waits_are_ignored(caplog: pytest.LogCaptureFixture, body: bytes) -> None:
    assert lines_of(caplog, lambda _: httpx.Response(200, content=body), 100.0)[0] == []
