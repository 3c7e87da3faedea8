"""Draining: running work completes, new work is refused with a status that clients retry."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import httpx
import pytest
import tinker

from tests.service.conftest import datum
from tests.service.support.process import LIMIT_S, child, free_port
from tinsmith.service.config import ServeConfig

pytestmark = pytest.mark.usefixtures("forked_programs")

KEY = "tml-x"


def config(data: Path) -> ServeConfig:
    return ServeConfig(models=("toy",), engine="fake", data=data, api_key=KEY, port=free_port())


def test_drain_completes_running_work_and_refuses_new_work(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with (
        child(settings, drain_s=LIMIT_S) as running,
        httpx.Client(base_url=f"{running.url}/api/v1", headers={"X-API-Key": KEY}, timeout=LIMIT_S) as http,
    ):
        session = http.post("/create_session", json={}).json()["session_id"]
        made = http.post("/create_model", json={"session_id": session, "model_seq_id": 0, "base_model": "toy"}).json()
        http.post("/retrieve_future", json=made)
        step = {"model_id": made["model_id"], "adam_params": {}}
        running.hold()
        first, second = (http.post("/optim_step", json={**step, "seq_id": seq}).json() for seq in (1, 2))
        running.until_held()
        running.popen.send_signal(signal.SIGTERM)
        running.until_draining()
        refused = http.post("/optim_step", json={**step, "seq_id": 3})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert http.post("/session_heartbeat", json={"session_id": session}).status_code == 200
        running.release()
        assert "metrics" in http.post("/retrieve_future", json=first).json()
        assert running.popen.wait(LIMIT_S) == 0
    with (
        child(settings) as running,
        httpx.Client(base_url=f"{running.url}/api/v1", headers={"X-API-Key": KEY}, timeout=LIMIT_S) as http,
    ):
        assert "metrics" in http.post("/retrieve_future", json=second).json()


def test_sdk_client_survives_a_server_replacement(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with child(settings, drain_s=LIMIT_S) as running:
        client = tinker.ServiceClient(base_url=running.url, api_key=KEY)
        model = client.create_lora_training_client("toy", rank=4, seed=1).result()
        running.hold()
        under_way = model.forward_backward([datum([5, 6, 7])], "cross_entropy")
        running.until_held()
        running.popen.send_signal(signal.SIGTERM)
        running.until_draining()
        done = []
        waiting = threading.Thread(target=lambda: done.append(model.optim_step(tinker.types.AdamParams()).result()))
        waiting.start()
        running.release()
        assert under_way.result().metrics["loss:sum"] > 0
        assert running.popen.wait(LIMIT_S) == 0
    with child(settings):
        waiting.join(LIMIT_S)
        assert len(done) == 1
        assert model.forward([datum([5, 6, 7])], "cross_entropy").result().metrics["loss:sum"] > 0
        client.close("success").result()
