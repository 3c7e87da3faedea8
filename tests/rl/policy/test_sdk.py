"""A session of the SDK ends: when its block raises, and in bounded time."""

from __future__ import annotations

import asyncio
import socket

import pytest
import tinker

from tinsmith.rl.policy import sdk
from tinsmith.rl.policy.sdk import open_session


class Slow:
    """A service client whose session takes a moment to end; `statuses` receives the status."""

    def __init__(self, statuses: list[str]) -> None:
        self._statuses = statuses

    async def close(self, status: str) -> None:
        await asyncio.sleep(0.05)
        self._statuses.append(status)


def test_failing_block_closes_its_session_as_errored(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[str] = []
    monkeypatch.setattr(tinker, "ServiceClient", lambda **_where: Slow(statuses))

    async def divide(port: int) -> None:
        async with open_session("dividing", f"http://127.0.0.1:{port}", "tml-x"):
            raise ZeroDivisionError

    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ZeroDivisionError):
        asyncio.run(divide(listener.getsockname()[1]))
    assert statuses == ["errored"]


def test_session_that_does_not_end_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(sdk, "CLOSE_SECONDS", 0.01)
    statuses: list[str] = []
    asyncio.run(sdk.end_session(Slow(statuses), "success"))  # pyright: ignore[reportArgumentType]
    assert statuses == []
    assert caplog.messages == ["The session did not end within 0.01 s; its server ends it once this process is gone."]
