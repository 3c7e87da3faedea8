"""Addresses of Ray clusters that are refused. Needs no Ray."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tinsmith.engine.processes import ray_checks
from tinsmith.errors import ConfigError


def test_address_where_nothing_listens_is_refused_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with monkeypatch.context() as patch:
            patch.setattr(ray_checks, "REACH_HEAD_S", 0.2)
            with pytest.raises(ConfigError, match=f"no Ray cluster at {address}"):
                asyncio.run(ray_checks.check_address(address))
        listener.listen()
        asyncio.run(ray_checks.check_address(address))
