"""Keys and a running server: reloads, and the keys that a start requires."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.service.support.databases import url_of
from tests.service.support.inprocess import Factory
from tests.service.support.process import child, free_port
from tinsmith.errors import ConfigError
from tinsmith.service.config import ServeConfig
from tinsmith.service.server import run_service
from tinsmith.service.tenancy.keys import create_key, open_key_database

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]

NOTICED_S = 120.0
"""Far longer than a server needs: the machine may stand still."""


def keys(data: Path, *words: str) -> str:
    """`tinsmith keys …` in a process of its own."""
    command = [sys.executable, "-m", "tinsmith", "keys", *words, "--data", str(data)]
    if url := url_of(data):
        command += ["--database", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def becomes(url: str, key: str, status: int) -> None:
    deadline = time.monotonic() + NOTICED_S
    while True:
        answer = httpx.post(f"{url}/api/v1/client/config", json={}, headers={"X-API-Key": key}, timeout=60)
        if answer.status_code == status:
            return
        assert time.monotonic() < deadline, f"still {answer.status_code}"
        time.sleep(0.1)


def test_running_server_reloads_keys_within_seconds(tmp_path: Path) -> None:
    settings = ServeConfig(models=("toy",), engine="fake", data=tmp_path, api_key="tml-x", port=free_port())
    with child(settings) as served:
        key = keys(tmp_path, "create", "alice-laptop", "--tenant", "alice", "--models", "1").strip().split("=")[1]
        becomes(served.url, key, 200)
        becomes(served.url, "tml-x", 200)
        listed = keys(tmp_path, "list")
        assert "alice-laptop" in listed
        assert "models 1" in listed
        assert key not in listed
        keys(tmp_path, "revoke", "alice-laptop")
        becomes(served.url, key, 401)
        becomes(served.url, "tml-x", 200)
    assert key not in (tmp_path / "log").read_text()


def test_public_address_requires_an_explicit_key(tmp_path: Path) -> None:
    """The generated key of a local start does not count."""

    async def serve(**changes) -> str | None:
        options = {"models": ("toy",), "engine": "fake", "data": tmp_path, "database": url_of(tmp_path), **changes}
        async with run_service(ServeConfig(**options), Factory(), lambda error: None) as service:
            return service.key

    async def make() -> None:
        async with open_key_database(tmp_path, url_of(tmp_path)) as engine:
            await create_key(engine, "a", "alice")

    assert asyncio.run(serve())
    with pytest.raises(ConfigError, match="tinsmith keys create"):
        asyncio.run(serve(host="0.0.0.0"))
    assert asyncio.run(serve(host="0.0.0.0", api_key="tml-given")) == "tml-given"
    asyncio.run(make())
    assert asyncio.run(serve(host="0.0.0.0")) is None
