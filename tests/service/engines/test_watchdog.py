"""Engine processes that are stopped, that hang or that someone kills: restarted, and no request is lost.

The fake engine runs in a process of its own here, as the real ones do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.service.engines.running import host_of, pid_of, started, training
from tests.service.support.inprocess import api, loss_in, pass_body
from tests.service.support.process import LIMIT_S, child, free_port, separate
from tinsmith.engine.config import EngineConfig
from tinsmith.errors import EngineDied
from tinsmith.service.config import ServeConfig
from tinsmith.service.engines.host import RunningEngine, start_engine
from tinsmith.service.http.serving import DRAIN_S

pytestmark = pytest.mark.e2e

KEY = {"X-API-Key": "tml-x"}
HOLD_S = 44.0
"""The longest time for which a poll may be held."""


def test_stopped_engine_is_replaced(tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SIGSTOP: the waiting request completes in another process, and the service says so meanwhile.

    Fails without the watchdog task in `EngineHost._load`.
    """
    options = {"engine": "torch", "models": (f"toy={tiny_llama}",), "dtype": "float32", "threads": 1}

    async def main() -> None:
        async with api(tmp_path, start_engine, engine_timeout_s=4.0, hold_s=40, **options) as app:
            host, model = host_of(app), await app.model(seed=1)
            first = pid_of(host)
            os.kill(first, signal.SIGSTOP)
            promise = (await app.post("forward_backward", pass_body(model, 1))).json()
            states, statuses = set(), set()
            result = asyncio.create_task(app.result(promise))
            while not result.done():
                states.add(host.state)
                statuses |= {(await app.http.get(path)).status_code for path in ("/readyz", "/api/v1/healthz")}
                await asyncio.sleep(0.02)
            assert loss_in(await result) > 0
            assert {"stalled", "restarting"} & states
            assert statuses == {200, 503}
            assert pid_of(host) != first
            assert "is killed (stalled: no heartbeat for 3 s" in caplog.text
            assert "It was running: run." in caplog.text

    asyncio.run(main())


def test_engine_that_hangs_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A process that lives but makes no progress: it reads a file that is a pipe. Fails without the progress limit."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "saved").mkdir(exist_ok=True)
        os.mkfifo(tmp_path / "saved" / name)

    async def main() -> None:
        async with api(tmp_path, separate, engine_timeout_s=4.0, hold_s=40) as app:
            host, model = host_of(app), await app.model(seed=1)
            with pytest.raises(EngineDied, match="no progress"):
                await host.engine.load("hung", tmp_path / "saved", optimizer=False)
            await started(host, 2)
            assert "no progress for 4 s). It was running: load." in caplog.text
            assert len(await training(app, model, 1)) == 1

    asyncio.run(main())


@pytest.mark.parametrize(("number", "fails"), [(signal.SIGSEGV, True), (signal.SIGKILL, False)])
def test_own_deaths_fail_a_request(number: int, fails: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A request whose engine dies each time it runs: after three deaths of its own it fails, unless someone else
    killed the engine."""

    async def start(config: EngineConfig) -> RunningEngine:
        running = await separate(config)
        assert running.process is not None
        run, pid = running.engine.run, running.process.pid

        async def deadly(passes):
            deaths.append(pid)
            if len(deaths) <= 4:
                os.kill(pid, number)
            return await run(passes)

        running.engine.run = deadly  # type: ignore[method-assign]
        return running

    deaths: list[int] = []

    async def main() -> None:
        async with api(tmp_path, start, hold_s=40) as app:
            model = await app.model(seed=1)
            answer = await app.result((await app.post("forward_backward", pass_body(model, 1))).json())
            if not fails:
                assert loss_in(answer) > 0
                assert len(deaths) == 5
                return
            assert "died 3 times while it ran this request by itself" in answer.json()["error"]
            assert len(deaths) == 3
            assert "SIGSEGV: a memory fault" in caplog.text

    asyncio.run(main())


def test_signal_ends_a_server_whose_engine_is_stopped(tmp_path: Path) -> None:
    """Long before the poll's time is over, without a traceback, though requests run and polls are open.

    Fails without the `except CancelledError` of `RequestMiddleware`.
    """
    options = {"models": ("toy",), "engine": "fake", "api_key": "tml-x", "hold_s": HOLD_S}
    config = ServeConfig(data=tmp_path, port=free_port(), **options)
    with (
        child(config, separate=True) as running,
        httpx.Client(base_url=running.url, headers=KEY, timeout=LIMIT_S) as http,
    ):
        session = http.post("/api/v1/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "toy"}
        model = http.post("/api/v1/create_model", json=body).json()
        http.post("/api/v1/retrieve_future", json=model)
        completion = {"model": "toy", "prompt": [5], "max_tokens": 4}
        assert http.post("/v1/completions", json=completion).status_code == 200  # has imported the tokenizer
        os.kill(running.engine_pid, signal.SIGSTOP)
        step = {"model_id": model["model_id"], "seq_id": 1, "adam_params": {}}
        promise = http.post("/api/v1/optim_step", json=step).json()
        with ThreadPoolExecutor() as pool:
            pool.submit(http.post, "/v1/completions", json=completion)
            pool.submit(http.post, "/v1/completions", json={**completion, "stream": True})
            poll = pool.submit(http.post, "/api/v1/retrieve_future", json=promise)
            running.until_polls_wait(1)
            start = time.monotonic()
            running.popen.send_signal(signal.SIGTERM)
            assert running.popen.wait(LIMIT_S) == 0
            assert time.monotonic() - start < HOLD_S - DRAIN_S, "it ended the poll instead of waiting for its time"
            assert poll.result().status_code == 408
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert "the next server continues it" in log
