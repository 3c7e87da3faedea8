"""Start and shutdown of the server."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.service.support.process import LIMIT_S, Child, child, eventually, free_port
from tinsmith.errors import ConfigError
from tinsmith.service.config import ServeConfig
from tinsmith.service.server import serve

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]

HOLD_S = 44.0
"""The longest time for which a poll may be held."""


def config(data: Path, **changes) -> ServeConfig:
    return ServeConfig(models=("toy",), engine="fake", data=data, api_key="tml-x", **{"port": free_port(), **changes})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_server_with_open_polls(tmp_path: Path, number: int) -> None:
    with (
        child(config(tmp_path, hold_s=HOLD_S), delay=600) as running,
        httpx.Client(base_url=f"{running.url}/api/v1", headers={"X-API-Key": "tml-x"}, timeout=LIMIT_S) as http,
    ):
        session = http.post("/create_session", json={}).json()["session_id"]
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
        sampler_id = http.post("/create_sampling_session", json=sampler).json()["sampling_session_id"]
        made = {"session_id": session, "model_seq_id": 0, "base_model": "toy"}
        promise = http.post("/create_model", json=made).json()
        http.post("/retrieve_future", json=promise)
        ask = {"sampling_session_id": sampler_id, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
        promises = [
            http.post("/optim_step", json={"model_id": promise["model_id"], "seq_id": 1, "adam_params": {}}).json(),
            http.post("/asample", json=ask).json(),
        ]
        answers: list[int] = []

        def poll(promise: dict) -> None:
            answers.append(http.post("/retrieve_future", json=promise).status_code)

        polls = [threading.Thread(target=poll, args=(item,)) for item in promises * 5]
        for thread in polls:
            thread.start()
        running.until_polls_wait(10)
        began = time.monotonic()
        running.popen.send_signal(number)
        assert running.popen.wait(LIMIT_S) == 0
        assert time.monotonic() - began < HOLD_S - 4, "it ended the polls instead of waiting for their time"
        for thread in polls:
            thread.join()
        assert answers == [408] * 10


def test_healthz_is_503_while_models_load(tmp_path: Path) -> None:
    with child(config(tmp_path), held=True) as running:
        eventually(lambda: healthz(running) is not None)
        assert healthz(running) == 503
        running.release()
        eventually(lambda: healthz(running) != 503)
        assert healthz(running) == 200
        assert running.popen.stdout.readline()


def healthz(running: Child) -> int | None:
    """The status of /healthz; None before the port is open."""
    try:
        return httpx.get(f"{running.url}/api/v1/healthz", timeout=LIMIT_S).status_code
    except httpx.ConnectError:
        return None


def test_request_waits_for_a_loading_model(tmp_path: Path) -> None:
    with child(config(tmp_path), held=True) as running, ThreadPoolExecutor() as pool:
        eventually(lambda: healthz(running) == 503)
        url, headers = f"{running.url}/api/v1/get_server_capabilities", {"X-API-Key": "tml-x"}
        waiting = pool.submit(httpx.get, url, headers=headers, timeout=LIMIT_S)
        time.sleep(0.2)
        assert not waiting.done()
        running.release()
        assert waiting.result().json()["supported_models"][0]["max_context_length"] == 32768


def test_data_folder_and_port_are_exclusive(tmp_path: Path) -> None:
    first = config(tmp_path)
    with child(first):
        same_folder = config(tmp_path)
        same_port = config(tmp_path / "other", port=first.port)
        code = """
import sys
from tinsmith.errors import ConfigError
from tinsmith.service.server import serve
from tinsmith.errors import ConfigError
from tinsmith.service.config import ServeConfig
from tinsmith.service.server import serve
for config in sys.argv[1:]:
    try:
        serve(ServeConfig.model_validate_json(config))
    except ConfigError as error:
        print(error)
"""
        configs = [item.model_dump_json() for item in (same_folder, same_port)]
        done = subprocess.run([sys.executable, "-c", code, *configs], capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        folder, port = done.stdout.splitlines()
        assert "Another server uses" in folder
        assert "Cannot listen on" in port


def test_api_process_imports_neither_torch_nor_sdk(forked_programs: str) -> None:
    code = "import sys, tinsmith.service.server as a; print([m for m in ('torch', 'tinker') if m in sys.modules])"
    done = subprocess.run([forked_programs, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.strip() == "[]"


def test_generated_key_is_stable_and_private(tmp_path: Path) -> None:
    settings = config(tmp_path).model_copy(update={"api_key": None})
    keys = []
    for _ in range(2):
        with child(settings) as running:
            key_file = tmp_path / "api-key"
            keys.append(key_file.read_text().strip())
            assert key_file.stat().st_mode & 0o777 == 0o600
            answer = httpx.post(
                f"{running.url}/api/v1/create_session", json={}, headers={"X-API-Key": keys[-1]}, timeout=60
            )
            assert answer.status_code == 200
    assert keys[0] == keys[1]
    assert keys[0].startswith("tml-")
    log = (tmp_path / "log").read_text()
    assert log.count(f'export TINKER_API_KEY="$(cat {key_file})"') == 1
    assert keys[0] not in log


def test_adapter_is_refused_before_a_key_is_made(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds an adapter, not a model"):
        serve(ServeConfig(models=(f"tuned={tmp_path}",), data=tmp_path / "data"))
    assert not (tmp_path / "data").exists()
