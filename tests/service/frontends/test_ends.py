"""Front ends and cores that end: by SIGKILL, by a signal to stop, and one before the other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.service.support.frontends import COUNT
from tests.service.support.inprocess import api
from tests.service.support.process import LIMIT_S, Child, child, free_port
from tinsmith.errors import ConfigError
from tinsmith.service.config import ServeConfig
from tinsmith.service.frontends import pool as frontend_pool
from tinsmith.service.frontends.serving import listen

KEY = "tml-x"


def config(data: Path, **changes) -> ServeConfig:
    options = {"models": ("toy",), "engine": "fake", "api_key": KEY, "frontends": 2}
    return ServeConfig(data=data, **{"port": free_port(), **options, **changes})


def frontends_of(running: Child) -> list[psutil.Process]:
    """The front ends of a service with two of them, once both run."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        children = psutil.Process(running.popen.pid).children()
        if len(children) == 2:
            return children
        time.sleep(0.05)
    raise AssertionError("There are no two front ends.")


@pytest.mark.slow
def test_silent_front_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without `Frontend._watch`: a stopped front end holds its clients forever."""
    monkeypatch.setenv(COUNT, "1")
    monkeypatch.setattr(frontend_pool, "SILENCE_S", 12.0)

    async def main() -> None:
        async with api(tmp_path) as app:
            assert app.pool is not None
            assert (await app.http.get("/livez")).status_code == 200
            (pid,) = app.pool.pids
            os.kill(pid, signal.SIGSTOP)
            for _ in range(600):
                if app.pool.pids not in ([], [pid]):
                    break
                await asyncio.sleep(0.1)
            assert app.pool.pids != [pid]

    asyncio.run(main())


def test_killed_core_ends_its_front_ends_and_frees_the_port(tmp_path: Path) -> None:
    """Fails if a front end outlives its core (`end` in `process.run`): the next core cannot have the port."""
    settings = config(tmp_path, hold_s=44.0)
    with child(settings, delay=600.0) as running:
        children = frontends_of(running)
        with httpx.Client(base_url=f"{running.url}/api/v1", headers={"X-API-Key": KEY}, timeout=LIMIT_S) as http:
            session = http.post("/create_session", json={}).json()["session_id"]
            made = {"session_id": session, "model_seq_id": 0, "base_model": "toy"}
            model = http.post("/create_model", json=made).json()
            assert http.post("/retrieve_future", json=model).status_code == 200
            step = {"model_id": model["model_id"], "seq_id": 1, "adam_params": {}}
            promise = http.post("/optim_step", json=step).json()
            answers = []
            poll = threading.Thread(target=lambda: answers.append(http.post("/retrieve_future", json=promise)))
            poll.start()
            running.until_polls_wait(1)
            running.popen.send_signal(signal.SIGKILL)
            poll.join(LIMIT_S)
            (answer,) = answers
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            running.popen.wait()
            assert psutil.wait_procs(children, LIMIT_S)[1] == []
    with child(settings) as running, httpx.Client(headers={"X-API-Key": KEY}, timeout=LIMIT_S) as http:
        result = http.post(f"{running.url}/api/v1/retrieve_future", json=promise)
        assert "metrics" in result.json()


def test_stop_finishes_running_work_and_ends_front_ends(tmp_path: Path) -> None:
    """Fails if SIGTERM, which systemd sends to all processes of a service, ends the front ends before the core."""
    with child(config(tmp_path), drain_s=LIMIT_S) as running:
        children = frontends_of(running)
        with httpx.Client(base_url=f"{running.url}/api/v1", headers={"X-API-Key": KEY}, timeout=LIMIT_S) as http:
            session = http.post("/create_session", json={}).json()["session_id"]
            made = {"session_id": session, "model_seq_id": 0, "base_model": "toy"}
            model = http.post("/create_model", json=made).json()
            http.post("/retrieve_future", json=model)
            step = {"model_id": model["model_id"], "adam_params": {}}
            running.hold()
            first = http.post("/optim_step", json={**step, "seq_id": 1}).json()
            running.until_held()
            for process in (*children, psutil.Process(running.popen.pid)):
                process.send_signal(signal.SIGTERM)
            running.until_draining()
            refused = http.post("/optim_step", json={**step, "seq_id": 2})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            running.release()
            assert "metrics" in http.post("/retrieve_future", json=first).json()
        assert running.popen.wait(LIMIT_S) == 0
        assert psutil.wait_procs(children, LIMIT_S)[1] == []


def test_port_in_use_is_refused_with_front_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.service.frontends.serving.PORT_FREE_S", 0.2)

    async def main() -> None:
        settings = config(tmp_path)
        with await listen(settings), pytest.raises(ConfigError, match="Cannot listen"):
            await listen(settings)

    asyncio.run(main())


def test_front_end_imports_no_database_and_no_engine() -> None:
    """A front end takes a tenth of a second to start, and little memory."""
    program = "import sys, tinsmith.service.frontends.process; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded & {"sqlalchemy", "torch", "tinker", "transformers", "tinsmith.service.server"} == set()
    assert "uvicorn" in loaded
