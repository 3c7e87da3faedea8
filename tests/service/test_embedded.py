"""`embedded`: a service for a block of code, which ends with the block or with its parent process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tinsmith.errors import ConfigError
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.e2e


def children(*, recursive: bool = False) -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=recursive)}


def assert_no_more_than(before: set[int]) -> None:
    """Nothing that was started since is left. Processes of earlier tests may end meanwhile."""
    deadline = time.monotonic() + 120
    while (left := children(recursive=True) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def test_embedded_service_runs_for_the_block(tmp_path: Path) -> None:
    before = children(recursive=True)
    with embedded(ServeConfig(models=("toy",), engine="fake", data=tmp_path)) as (url, key):
        assert httpx.get(f"{url}/api/v1/healthz", timeout=60).json() == {"status": "ok"}
        answer = httpx.post(f"{url}/api/v1/create_session", json={}, headers={"X-API-Key": key}, timeout=60)
        assert answer.status_code == 200
        assert len(children() - before) == 1
        ending = time.monotonic()
    assert time.monotonic() - ending < 60
    assert_no_more_than(before)
    log = tmp_path / "serve.log"
    assert "Ready" in log.read_text()
    assert "Other users of this machine" not in log.read_text()
    assert log.stat().st_mode & 0o077 == 0
    assert not (tmp_path / "api-key").exists()


def test_failed_start_raises_its_reason(tmp_path: Path) -> None:
    config = ServeConfig(models=("toy",), engine="fake", data=tmp_path)
    with embedded(config), pytest.raises(ConfigError) as error, embedded(config):
        pass
    assert error.value.message == f"The service did not start: Another server uses {tmp_path}."
    assert error.value.hint == f"End it, or give this one its own --data. Its log is {tmp_path / 'serve.log'}."


def test_embedded_service_dies_with_its_parent(tmp_path: Path) -> None:
    code = f"""
import os, sys, time
from pathlib import Path
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded
import psutil
with embedded(ServeConfig(models=("toy",), engine="fake", data=Path({str(tmp_path)!r}))):
    print(psutil.Process().children()[0].pid, flush=True)
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and alive(pid):
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_service_that_is_killed_is_started_again(tmp_path: Path) -> None:
    """Fails if `_Service.start` does not start the thread."""
    before = children(recursive=True)
    with embedded(ServeConfig(models=("toy",), engine="fake", data=tmp_path)) as (url, key):
        answer = httpx.post(f"{url}/api/v1/create_session", json={}, headers={"X-API-Key": key}, timeout=60)
        (pid,) = children() - before
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 240
        while not responds(url):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        body = {"session_id": answer.json()["session_id"]}
        heartbeat = httpx.post(f"{url}/api/v1/session_heartbeat", json=body, headers={"X-API-Key": key}, timeout=60)
        assert heartbeat.status_code == 200
    assert_no_more_than(before)


def responds(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/healthz", timeout=60).is_success
    except httpx.HTTPError:
        return False
