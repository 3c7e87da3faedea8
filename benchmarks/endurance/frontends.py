"""The service with and without HTTP front ends: `python -m benchmarks.endurance.frontends`.

Three services with an engine that computes nothing, with 0, 1 and 2 front ends, take turns. In a turn 16 clients in
this process send one kind of request, each the next one when it has the result of the last. Measured are the CPU time
that the core takes for a request, which decides how many engines one core serves, that of the front ends, the rate,
and the time from a request to its result. On two cores, clients, core and front ends compete: there the rate says
little about machines with a core for each.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil

from benchmarks.comparison import percentile
from benchmarks.endurance.http_client import Client
from benchmarks.servers import KEY, Server, timed_service
from tinsmith.service.wire.protobuf import pb

RESULTS = Path(__file__).parents[1] / "results"
COUNTS = (0, 1, 2)
CLIENTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One kind of request at one service.

    Example: Turn(core_ms=1.1, frontend_ms=0.0, rate=410.0, median_ms=35.0, p99_ms=61.0)
    """

    core_ms: float
    """CPU time of the core for a request and its result."""
    frontend_ms: float
    rate: float
    median_ms: float
    p99_ms: float


@dataclass(kw_only=True)
class Load:
    """The clients of one service, which keep their connections and models."""

    server: Server
    clients: list[Client] = field(default_factory=list)
    sampler: str = ""
    _numbers: itertools.count = field(default_factory=itertools.count)

    async def open(self) -> None:
        """Create sessions, models and a sampling session."""
        port = urlsplit(self.server.url).port
        assert port is not None
        self.clients = [Client(port, KEY, lambda _: None) for _ in range(CLIENTS)]
        for client in self.clients:
            await client.open(model="timed")
        session = {"session_id": self.clients[0].session, "sampling_session_seq_id": 0, "base_model": "timed"}
        self.sampler = (await self.clients[0].post("create_sampling_session", session))["sampling_session_id"]

    async def turn(self, request: Callable[[Load, Client], Awaitable[None]], seconds: float) -> Turn:
        """Send requests for some seconds."""
        frontends = self.server.process.children()
        latencies: list[float] = []
        until = time.perf_counter() + seconds
        before, frontends_before = _cpu_s([self.server.process]), _cpu_s(frontends)
        start = time.perf_counter()

        async def work(client: Client) -> None:
            while time.perf_counter() < until:
                began = time.perf_counter()
                await request(self, client)
                latencies.append(1000 * (time.perf_counter() - began))

        await asyncio.gather(*map(work, self.clients))
        taken, count = time.perf_counter() - start, len(latencies)
        return Turn(
            core_ms=1000 * (_cpu_s([self.server.process]) - before) / count,
            frontend_ms=1000 * (_cpu_s(frontends) - frontends_before) / count,
            rate=count / taken,
            median_ms=statistics.median(latencies),
            p99_ms=percentile(latencies, 0.99),
        )

    async def sample(self, client: Client, tokens: int) -> None:
        """A sample with a prompt of `tokens`, and its result."""
        body = {
            "sampling_session_id": self.sampler,
            "seq_id": next(self._numbers),
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [100 + index % 400 for index in range(tokens)]}]},
            "sampling_params": {"max_tokens": 1},
        }
        await client.result(await client.post("asample", body))


async def _step(load: Load, client: Client) -> None:
    await client.step(16)


async def _pass(load: Load, client: Client, rows: int) -> None:
    body = pass_body(client.model, client.next_seq(), rows, 300)
    await client.result(await client.post("forward_backward", body))


def pass_body(model: str, seq: int, rows: int, tokens: int) -> bytes:
    """A forward_backward with an RL loss, as the SDK encodes it: 20 bytes a token."""
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="importance_sampling")
    ids = np.arange(tokens) % 500 + 3
    floats = np.full(tokens, 0.5, "<f4").tobytes()
    for _ in range(rows):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = ids.astype("<i4").tobytes()
        inputs = {"target_tokens": (pb.DTYPE_INT64, ids.astype("<i8").tobytes())}
        inputs |= dict.fromkeys(("logprobs", "advantages"), (pb.DTYPE_FLOAT32, floats))
        for name, (dtype, data) in inputs.items():
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype, tensor.dense = dtype, data
            tensor.shape.append(tokens)
    return message.SerializeToString()


REQUESTS: dict[str, Callable[[Load, Client], Awaitable[None]]] = {
    "sample, prompt of 64 tokens": lambda load, client: load.sample(client, 64),
    "sample, prompt of 8,000 tokens": lambda load, client: load.sample(client, 8000),
    "forward_backward of 16 tokens and optim_step": _step,
    "forward_backward of 8 x 300 tokens (48 kB)": lambda load, client: _pass(load, client, 8),
    "forward_backward of 175 x 300 tokens (1 MiB)": lambda load, client: _pass(load, client, 175),
}


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


async def measure(servers: Sequence[Server], turns: int, seconds: float) -> dict[str, list[list[Turn]]]:
    """For each kind of request the turns of each service. The service that goes first alternates."""
    loads = [Load(server=server) for server in servers]
    for load in loads:
        await load.open()
    results: dict[str, list[list[Turn]]] = defaultdict(lambda: [[] for _ in loads])
    for turn in range(turns):
        order = range(len(loads)) if turn % 2 == 0 else reversed(range(len(loads)))
        for place in order:
            for name, request in REQUESTS.items():
                results[name][place].append(await loads[place].turn(request, seconds))
    return results


def lines(results: dict[str, list[list[Turn]]]) -> list[str]:
    """The table as Markdown."""
    rows = [
        "| request and its result | front ends | core, ms of CPU | by that of 0, in pairs | front ends, ms of CPU "
        "| a second | median, ms | p99, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, by_count in results.items():
        for count, turns in zip(COUNTS, by_count, strict=True):
            ratios = [turn.core_ms / base.core_ms for turn, base in zip(turns, by_count[0], strict=True)]
            shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if count else ""
            rows.append(
                f"| {name} | {count} | {_median(turns, 'core_ms'):.2f} | {shown} | {_median(turns, 'frontend_ms'):.2f} "
                f"| {_median(turns, 'rate'):.0f} | {_median(turns, 'median_ms'):.0f} | {_median(turns, 'p99_ms'):.0f} |"
            )
    return rows


def _median(turns: Sequence[Turn], name: str) -> float:
    return statistics.median(asdict(turn)[name] for turn in turns)


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn of one kind of request")
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as data, ExitStack() as stack:
        servers = [stack.enter_context(timed_service(Path(data) / str(count), count)) for count in COUNTS]
        results = asyncio.run(measure(servers, arguments.turns, arguments.seconds))
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"
    load = f"load before / after: {load_before:.1f} / {os.getloadavg()[0]:.1f}"
    about = (
        f"Measured by `benchmarks/endurance/frontends.py` on {machine}; {load}; {arguments.turns} turns, medians. "
        f"{CLIENTS} clients in one process compete for the same cores, so the rates are not those of a machine with a "
        "core for each process; the CPU time of the core says how many requests one core serves."
    )
    table = lines(results)
    text = "\n".join(["# HTTP front ends", "", about, "", *table, ""])
    (RESULTS / "frontends.md").write_text(text)
    figures = {name: [[asdict(turn) for turn in turns] for turns in by_count] for name, by_count in results.items()}
    (RESULTS / "frontends.json").write_text(json.dumps(figures) + "\n")
    print("\n".join(table))


if __name__ == "__main__":
    main()
