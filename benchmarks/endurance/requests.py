"""Rate of small training requests through the whole service, on disks that take 0, 1 and 8 ms to sync.

`python -m benchmarks.endurance.requests [--against SRC]` runs the service with the fake engine in a process of its own.
A client in this process trains many models over HTTP, a connection for each: it submits a forward_backward and an
optim_step, one after the other, then fetches both results. Bodies are encoded before the clock starts and answers are
not parsed beyond status and length, so that the client takes less CPU than the service; both are printed. The time of
a sync is slept in every commit, in addition to the real one.

`--against` repeats all runs, interleaved, with the package of another source folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from benchmarks.endurance.http_client import Client, pass_body
from benchmarks.endurance.server import running_service
from benchmarks.endurance.slow_disk import COMMITS, SYNC_MS

RESULTS = Path(__file__).parents[1] / "results"
DISKS_MS = (0.0, 1.0, 8.0)
WANTED = {1.0: 1000, 8.0: 300}
"""Requests a second that the service is to reach on a disk with these syncs."""


class RawConnection(asyncio.Protocol):
    """A connection that sends encoded requests and returns (status, body), without parsing more than it must."""

    def __init__(self) -> None:
        self._buffer = b""
        self._waiting: deque[asyncio.Future[tuple[int, bytes]]] = deque()
        self._transport: Any = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        while (end := buffer.find(b"\r\n\r\n")) >= 0:
            start = buffer.find(b"content-length: ") + 16
            body_end = end + 4 + int(buffer[start : buffer.find(b"\r\n", start)])
            if len(buffer) < body_end:
                break
            self._waiting.popleft().set_result((int(buffer[9:12]), buffer[end + 4 : body_end]))
            buffer = buffer[body_end:]
        self._buffer = buffer

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        for waiting in self._waiting:
            waiting.set_exception(exc or ConnectionError("The server has closed the connection."))

    async def call(self, request: bytes) -> bytes:
        """The body of the answer. Raises RuntimeError unless its status is 200."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self._transport.write(request)
        status, body = await answer
        if status != 200:
            raise RuntimeError(f"{status}: {body[:300]!r}")
        return body


def encoded(path: str, key: str, body: bytes) -> bytes:
    """An HTTP request."""
    head = f"POST /api/v1/{path} HTTP/1.1\r\nhost: l\r\nx-api-key: {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def round_requests(model: str, key: str, seq: int, tokens: int) -> list[bytes]:
    """Two submissions, `seq` and the next, and the polls for their results."""
    adam = {"learning_rate": 0.001}
    step = {"model_id": model, "seq_id": seq + 1, "adam_params": adam}
    polls = [{"request_id": f"{model}:{number}"} for number in (seq, seq + 1)]
    return [
        encoded("forward_backward", key, pass_body(model, seq, tokens)),
        encoded("optim_step", key, json.dumps(step).encode()),
        *(encoded("retrieve_future", key, json.dumps(poll).encode()) for poll in polls),
    ]


async def train(port: int, requests: Sequence[bytes], latencies: list[float]) -> None:
    """Send requests one after another, as of `round_requests`; times the submissions."""
    _, connection = await asyncio.get_running_loop().create_connection(RawConnection, "127.0.0.1", port)
    for number, request in enumerate(requests):
        start = time.perf_counter()
        await connection.call(request)
        if number % 4 < 2:
            latencies.append(time.perf_counter() - start)


async def measure(models: int, rounds: int, tokens: int, sync_ms: float) -> dict[str, float]:
    """Requests per second, CPU of both sides, the time to accept one, and requests in a commit."""
    with tempfile.TemporaryDirectory() as data, tempfile.NamedTemporaryFile() as commits:
        os.environ[SYNC_MS], os.environ[COMMITS] = str(sync_ms), commits.name
        module = "benchmarks.endurance.slow_disk"
        async with running_service(Path(data), ["tenant"], module=module, capture_every=10**9) as (server, port, [key]):
            clients = [Client(port=port, key=key, on_submit=lambda _: None) for _ in range(models)]
            for client in clients:
                await client.open(rank=1)
            plans = [
                [
                    request
                    for seq in range(1, 2 * rounds, 2)
                    for request in round_requests(client.model, key, seq, tokens)
                ]
                for client in clients
            ]
            latencies: list[float] = []
            begin, own, service = time.perf_counter(), time.process_time(), _cpu_s(server.process)
            await asyncio.gather(*(train(port, plan, latencies) for plan in plans))
            seconds, own = time.perf_counter() - begin, time.process_time() - own
            service = _cpu_s(server.process) - service
            for client in clients:
                client.close()
        count, commit_count = 2 * rounds * models, int(Path(commits.name).read_text())
    return {
        "requests/s": count / seconds,
        "service's CPU, ms/request": 1000 * service / count,
        "client's CPU, ms/request": 1000 * own / count,
        "p99 of a submission, ms": 1000 * statistics.quantiles(latencies, n=100)[98],
        "requests/commit": 2 * count / commit_count,
    }


def _cpu_s(process: Any) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    """Measure, print a line for each disk and source folder, and write the table of this source folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=64, help="models in training at the same time")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each model, two requests each")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a forward_backward")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each measurement; the median is printed")
    parser.add_argument("--against", type=Path, help="source folder with another tinsmith package")
    parser.add_argument("--sync-ms", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sync_ms is not None:
        print(json.dumps(asyncio.run(measure(options.models, options.rounds, options.tokens, options.sync_ms))))
        return
    load = [os.getloadavg()[0]]
    sources = {"this": Path(__file__).parents[2] / "src", **({"other": options.against} if options.against else {})}
    runs: dict[tuple[float, str], list[dict[str, float]]] = {}
    for _ in range(options.repeat):
        for sync_ms in DISKS_MS:
            for name, source in sources.items():
                runs.setdefault((sync_ms, name), []).append(_in_process(source, sync_ms, options))
    medians = {
        key: {name: statistics.median(result[name] for result in results) for name in results[0]}
        for key, results in runs.items()
    }
    for (sync_ms, name), values in medians.items():
        print(f"{sync_ms:g} ms, {name}: " + ", ".join(f"{value:.4g} {key}" for key, value in values.items()))
    _write({sync_ms: values for (sync_ms, name), values in medians.items() if name == "this"}, options, load)


def _write(medians: dict[float, dict[str, float]], options: argparse.Namespace, load: list[float]) -> None:
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"
    load = [*load, os.getloadavg()[0]]
    names = list(medians[0.0])
    lines = [
        "# Small training requests",
        "",
        f"Measured by `benchmarks/endurance/requests.py` on {machine}; load average before / after: {load[0]:.1f} / "
        f"{load[1]:.1f}. {options.models} models in training, passes of {options.tokens} tokens, fake engine; medians "
        f"of {options.repeat} runs.",
        "",
        f"| each sync takes longer by | {' | '.join(names)} | wanted, requests/s |",
        "|---" * (len(names) + 2) + "|",
        *(_row(sync_ms, values) for sync_ms, values in medians.items()),
        "",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "requests.md").write_text("\n".join(lines))
    values = {"measured": time.strftime("%Y-%m-%d %H:%M"), "machine": machine, "load_average": load, "disks": medians}
    (RESULTS / "requests.json").write_text(json.dumps(values, indent=1) + "\n")


def _row(sync_ms: float, values: dict[str, float]) -> str:
    cells = [f"{sync_ms:g} ms", *(f"{value:.4g}" for value in values.values()), str(WANTED.get(sync_ms, ""))]
    return f"| {' | '.join(cells)} |"


def _in_process(source: Path, sync_ms: float, options: argparse.Namespace) -> dict[str, float]:
    counts = [f"--{name}={getattr(options, name)}" for name in ("models", "rounds", "tokens")]
    path = os.pathsep.join([str(source), str(Path(__file__).parents[2])])
    command = [sys.executable, "-m", "benchmarks.endurance.requests", f"--sync-ms={sync_ms}", *counts]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
