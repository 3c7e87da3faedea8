"""Rate of small training requests through the whole service, on disks that take 0, 1 and 8 ms to sync.

`python -m benchmarks.endurance.requests` runs the service with the fake engine in this process. Clients of many models
call its ASGI application: each submits a forward_backward and an optim_step, then fetches both results. The time of a
sync is slept in every commit, in addition to the real one. `--against SRC` repeats all runs, interleaved, with the
package of another source folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import event

KEY = "tml-benchmark"
SYNC_MS = (0.0, 1.0, 8.0)


class Client:
    """Calls an ASGI application without a socket."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def post(self, path: str, body: bytes | dict[str, Any]) -> bytes:
        """The body of the response. Raises RuntimeError unless its status is 200."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        path = f"/api/v1/{path}"
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"x-api-key", KEY.encode()), (b"content-length", str(len(content)).encode())],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "state": {},
        }
        messages = iter([{"type": "http.request", "body": content, "more_body": False}])
        status, parts = 0, []

        async def receive() -> dict[str, Any]:
            return next(messages, {"type": "http.disconnect"})

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        if status != 200:
            raise RuntimeError(f"{path} answered {status}: {b''.join(parts)[:300]!r}")
        return b"".join(parts)

    async def result(self, promise: bytes) -> bytes:
        """The result of a promised request."""
        return await self.post("retrieve_future", {"request_id": json.loads(promise)["request_id"]})


def pass_body(model: str, seq: int, tokens: int) -> bytes:
    """A forward_backward body with one row."""
    from tinsmith.service.wire.protobuf import pb

    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    datum = message.data.add()
    row = np.arange(3, 3 + tokens + 1)
    datum.model_input.add().encoded_text.tokens = row[:-1].astype("<i4").tobytes()
    target = datum.loss_fn_inputs["target_tokens"]
    target.dense, target.dtype = row[1:].astype("<i8").tobytes(), pb.DTYPE_INT64
    target.shape.append(tokens)
    return message.SerializeToString()


async def train(client: Client, model: str, rounds: int, tokens: int, latencies: list[float]) -> None:
    """Train a model, two requests a round."""
    adam = {"learning_rate": 0.001}
    for seq in range(1, 2 * rounds, 2):
        start = time.perf_counter()
        passed = await client.post("forward_backward", pass_body(model, seq, tokens))
        latencies.append(time.perf_counter() - start)
        stepped = await client.post("optim_step", {"model_id": model, "seq_id": seq + 1, "adam_params": adam})
        await client.result(passed)
        await client.result(stepped)


async def measure(models: int, rounds: int, tokens: int, sync_s: float) -> dict[str, float]:
    """Requests per second, milliseconds to accept one, and requests in a commit."""
    from tinsmith.engine.fake.engine import FakeEngine
    from tinsmith.service.app import create_app
    from tinsmith.service.config import ServeConfig
    from tinsmith.service.engines.host import RunningEngine
    from tinsmith.service.server import run_service

    async def start(config: Any) -> RunningEngine:
        return RunningEngine(engine=FakeEngine(config), died=asyncio.Event())

    loaded = asyncio.Event()
    with tempfile.TemporaryDirectory() as data:
        config = ServeConfig(data=Path(data), engine="fake", models=("toy",), api_key=KEY, capture_every=10**9)
        async with run_service(config, start, lambda _error: loaded.set()) as service:
            await loaded.wait()
            commits: list[float] = []

            def sync(_db: Any) -> None:
                commits.append(time.sleep(sync_s) or 0.0)

            client = Client(create_app(service))
            session = json.loads(await client.post("create_session", {"tags": []}))["session_id"]
            ids = [await _create(client, session, number) for number in range(models)]
            event.listen(service.store._sync_engine, "commit", sync)
            latencies: list[float] = []
            begin, cpu = time.perf_counter(), time.process_time()
            await asyncio.gather(*(train(client, model, rounds, tokens, latencies) for model in ids))
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    count = 2 * rounds * models
    p99 = 1000 * statistics.quantiles(latencies, n=100)[98]
    return {
        "requests/s": count / seconds,
        "CPU ms/request": 1000 * cpu / count,
        "p99 of a submit, ms": p99,
        "requests/commit": 2 * count / len(commits),
    }


async def _create(client: Client, session: str, number: int) -> str:
    body = {"session_id": session, "model_seq_id": number, "base_model": "toy", "lora_config": {"rank": 1}}
    promise = await client.post("create_model", body)
    await client.result(promise)
    return json.loads(promise)["model_id"]


def main() -> None:
    """Measure, and print a line for each disk and source folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=64, help="models in training at the same time")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each model, two requests each")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a forward_backward")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each measurement; the median is printed")
    parser.add_argument("--against", type=Path, help="source folder with another tinsmith package")
    parser.add_argument("--sync-ms", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sync_ms is not None:
        values = asyncio.run(measure(options.models, options.rounds, options.tokens, options.sync_ms / 1000))
        print(json.dumps(values))
        return
    sources = {"this": Path(__file__).parents[2] / "src", **({"other": options.against} if options.against else {})}
    runs: dict[tuple[float, str], list[dict[str, float]]] = {}
    for _ in range(options.repeat):
        for sync_ms in SYNC_MS:
            for name, source in sources.items():
                runs.setdefault((sync_ms, name), []).append(_in_process(source, sync_ms, options))
    for (sync_ms, name), results in runs.items():
        values = {key: statistics.median(result[key] for result in results) for key in results[0]}
        print(f"{sync_ms:g} ms, {name}: " + ", ".join(f"{value:.4g} {key}" for key, value in values.items()))


def _in_process(source: Path, sync_ms: float, options: argparse.Namespace) -> dict[str, float]:
    counts = [f"--{name}={getattr(options, name)}" for name in ("models", "rounds", "tokens")]
    path = os.pathsep.join([str(source), str(Path(__file__).parents[2])])
    command = [sys.executable, "-m", "benchmarks.endurance.requests", f"--sync-ms={sync_ms}", *counts]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
