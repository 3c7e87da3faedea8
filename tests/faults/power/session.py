"""A short session with a service whose writes are recorded, and what was answered to its client, and when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.faults.power.trace import Operation, read_trace, strace_command
from tests.faults.reference import digest
from tests.service.support.databases import free_port
from tests.service.support.inprocess import pass_body
from tests.service.support.process import ROOT
from tinsmith.service.config import ServeConfig

MODULE = "tests.service.support.process"
LONG_ROW = 4000
"""Tokens of a row whose payload is too large for the service to store it in its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """Something that the service has answered, which a power cut after `at` must not undo.

    Kinds `deleting` and `ending` are requests that have been sent: from then on both states are right.
    """

    at: float
    kind: str
    key: str
    value: Any = None


@dataclass(slots=True)
class Recording:
    """The operations of a session on its data folder, and its acknowledgements."""

    operations: list[Operation] = field(default_factory=list)
    acknowledged: list[Acknowledgement] = field(default_factory=list)


def record(folder: Path, *, steps: int, models: int) -> Recording:
    """Run a service under strace and a session of every kind of write with it."""
    recording = Recording()
    data, log = folder / "data", folder / "strace.log"
    data.mkdir()
    with _traced_service(data, log) as (url, pid):
        client = _Client(url, data, recording)
        client.use(models, steps)
        client.http.close()
        os.kill(pid, signal.SIGKILL)  # what an orderly end would write is not of interest
    recording.operations = read_trace(log, data)
    return recording


@contextmanager
def _traced_service(data: Path, log: Path) -> Iterator[tuple[str, int]]:
    """Yields (URL, process id) of a service with its engine in its own process, under strace."""
    config = ServeConfig(models=("toy",), engine="fake", data=data, port=free_port(), capture_every=3, hold_s=5.0)
    options = {"config": config.model_dump(mode="json"), "delay": 0.0, "separate": False, "drain_s": 5.0}
    with (data.parent / "service.log").open("ab") as errors:
        popen = subprocess.Popen(
            [*strace_command(log), sys.executable, "-m", MODULE],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    assert popen.stdin is not None
    assert popen.stdout is not None
    popen.stdin.write(json.dumps(options).encode())
    popen.stdin.close()
    try:
        url = popen.stdout.readline().decode().strip()
        assert url, (data.parent / "service.log").read_text()
        [child] = Path(f"/proc/{popen.pid}/task/{popen.pid}/children").read_text().split()
        yield url, int(child)
    finally:
        popen.wait(60) if popen.poll() is None and _ended(popen) else popen.kill()
        popen.wait()
        popen.stdout.close()


def _ended(popen: subprocess.Popen[bytes]) -> bool:
    """Whether the traced process has been killed, so that strace ends by itself."""
    return not Path(f"/proc/{popen.pid}/task/{popen.pid}/children").read_text().split()


class _Client:
    """Raw requests, because the time of each answer counts."""

    def __init__(self, url: str, data: Path, recording: Recording) -> None:
        self._data = data
        self._recording = recording
        self._seqs: dict[str, int] = {}
        key = (data / "api-key").read_text().strip()
        self.http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=60)
        self._acknowledge("key", key)

    def use(self, models: int, steps: int) -> None:
        """Train, save, load, sample, copy and delete."""
        session = self._call("create_session", {"tags": []})["session_id"]
        self._acknowledge("session", session)
        for number in range(models):
            self._use_model(session, number, steps)
        ended = self._call("create_session", {"tags": []})["session_id"]
        model = self._create_model(ended, 0)
        self._train(model, 2)
        path = self._save(model, "weights", "last")
        self._acknowledge("ending", ended)
        self.http.post(f"sessions/{ended}/finish", json={}).raise_for_status()
        self._acknowledge("end", ended)
        self._load_copy_delete(session, path, models)

    def _use_model(self, session: str, number: int, steps: int) -> None:
        model = self._create_model(session, number)
        for step in range(steps):
            self._train(model, 1)
            if step % 3 == 1:
                self._snapshot(session, model, 100 * number + step)
            if step % 4 == 2:
                self._save(model, "weights", f"state-{step}")
            if step % 4 == 3:
                self._save(model, "sampler_weights", f"sampler-{step}")

    def _load_copy_delete(self, session: str, path: str, models: int) -> None:
        body = {"session_id": session, "model_seq_id": models, "path": path, "optimizer": True, "base_model": "toy"}
        model = self._promised("load_weights", body)["model_id"]
        self._seqs[model] = 0
        self._train(model, 2)
        copied = self._call("copy_weights", {"source_path": path, "destination_project_id": "p"})
        copy = copied["tinker_path"] if "tinker_path" in copied else copied["path"]
        self._acknowledge_checkpoint(copy)
        run, kind, name = path.removeprefix("tinker://").split("/")
        checkpoint = f"training_runs/{run}/checkpoints/{kind}/{name}"
        self.http.post(f"{checkpoint}/publish").raise_for_status()
        self._acknowledge("published", path)
        self._acknowledge("deleting", path)
        self.http.delete(checkpoint).raise_for_status()
        self._acknowledge("deleted", path)

    def _create_model(self, session: str, number: int) -> str:
        lora = {"rank": 2, "seed": number}
        body = {"session_id": session, "model_seq_id": number, "base_model": "toy", "lora_config": lora}
        model = self._promised("create_model", body)["model_id"]
        self._seqs[model] = 0
        return model

    def _train(self, model: str, steps: int) -> None:
        for _ in range(steps):
            seq = self._next(model)
            length = LONG_ROW if seq % 5 == 0 else 4
            self._promised(
                "forward_backward", pass_body(model, seq, tokens=[5 + (seq + i) % 99 for i in range(length)])
            )
            body = {"model_id": model, "seq_id": self._next(model), "adam_params": {"learning_rate": 0.02}}
            self._promised("optim_step", body)

    def _save(self, model: str, kind: str, name: str) -> str:
        route = "save_weights" if kind == "weights" else "save_weights_for_sampler"
        path = self._promised(route, {"model_id": model, "seq_id": self._next(model), "path": name})["path"]
        self._acknowledge_checkpoint(path)
        return path

    def _snapshot(self, session: str, model: str, number: int) -> None:
        body = {"model_id": model, "seq_id": self._next(model), "sampling_session_seq_id": number}
        sampler = self._promised("save_weights_for_sampler", body)["sampling_session_id"]
        self._acknowledge("sampler", sampler, score(self.http, sampler))

    def _acknowledge_checkpoint(self, path: str) -> None:
        at = time.time()  # the files are read after this
        self._acknowledge("checkpoint", path, digest(folder_of(self._data, path)), at=at)

    def _promised(self, route: str, body: Any) -> dict[str, Any]:
        """Submit a request and fetch its result; both answers are acknowledgements."""
        promise = self._call(route, body)
        self._acknowledge("promise", promise["request_id"])
        answer = self.http.post("retrieve_future", json={"request_id": promise["request_id"]})
        assert answer.status_code == 200, answer.text
        self._acknowledge("result", promise["request_id"], answer.content)
        is_json = answer.headers["content-type"].startswith("application/json")
        values = answer.json() if is_json else {}
        assert "error" not in values, values
        return values

    def _call(self, route: str, body: Any) -> dict[str, Any]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = self.http.post(route, content=content)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def _next(self, model: str) -> int:
        self._seqs[model] += 1
        return self._seqs[model]

    def _acknowledge(self, kind: str, key: str, value: Any = None, *, at: float | None = None) -> None:
        at = time.time() if at is None else at
        self._recording.acknowledged.append(Acknowledgement(at=at, kind=kind, key=key, value=value))


def score(http: httpx.Client, sampler: str) -> bytes:
    """The answer to a sample of one token with the logprobs of its prompt."""
    body = {
        "sampling_session_id": sampler,
        "seq_id": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7, 8]}]},
        "sampling_params": {"max_tokens": 1, "seed": 3},
        "prompt_logprobs": True,
    }
    promise = http.post("asample", json=body).raise_for_status().json()
    return http.post("retrieve_future", json={"request_id": promise["request_id"]}).raise_for_status().content


def folder_of(data: Path, path: str) -> Path:
    """The folder of a checkpoint by its tinker:// path."""
    import sqlite3

    run, kind, name = path.removeprefix("tinker://").split("/")
    with sqlite3.connect(f"file:{data / 'tinsmith.db'}?mode=ro", uri=True) as db:
        query = "select id from checkpoints where run = ? and kind = ? and name = ? and not deleted"
        [(checkpoint,)] = db.execute(query, (run, kind, name)).fetchall()
    db.close()
    return data / "checkpoints" / checkpoint
