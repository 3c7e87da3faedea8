"""A session of the SDK: it has ended at the server when its block is left by an error."""

from __future__ import annotations

import asyncio
import socket

import pytest
import tinker

from tinsmith.rl.policy.sdk import open_session


class Slow:
    """A service client whose session takes a moment to end."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    async def close(self, status: str) -> None:
        await asyncio.sleep(0.05)
        self._told.append(status)


def test_a_block_that_fails_leaves_no_request_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(tinker, "ServiceClient", lambda **_where: Slow(told))

    async def divide(port: int) -> None:
        async with open_session("dividing", f"http://127.0.0.1:{port}", "tml-x"):
            raise ZeroDivisionError

    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ZeroDivisionError):
        asyncio.run(divide(listener.getsockname()[1]))
    assert told == ["errored"]
