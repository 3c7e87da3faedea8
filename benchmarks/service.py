"""Overhead of the service without a real engine: `make bench-service`.

The unmodified SDK against the service with an engine that only sleeps and, interleaved, against a stub that computes
nothing: the cost of the SDK cancels out. Measures 1,000 concurrent samples, sequential requests, and a large body
during other requests. Results go to benchmarks/results/service.{json,md}; the table is also printed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import re
import statistics
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tinker

from benchmarks.comparison import percentile
from benchmarks.servers import KEY, Server, Watch, stub, timed_service

RESULTS = Path(__file__).parent / "results"
PROMPT = tinker.ModelInput.from_ints(list(range(3, 67)))
SAMPLES = 1000
END_RANGE_S = (2.0, 12.0)
"""Period in which the concurrent samples end, in seconds from their submission: about 100 per second."""
MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrentSamples:
    """Many concurrent samples of one client."""

    late_ms: list[float]
    """Milliseconds from the end of each sample in the engine to its arrival at the client."""
    polls: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All measurements; times in milliseconds, one entry for each turn or request."""

    ours: list[ConcurrentSamples]
    theirs: list[ConcurrentSamples]
    idle_bytes: int
    peak_bytes: int
    single_ms: dict[str, tuple[list[float], list[float]]]
    """Sequential operation -> (ours, the stub's)."""
    ping_ms: list[float]
    """Latency of healthz while large bodies arrive, and while the server is idle."""
    quiet_ms: list[float]
    body_bytes: int

    def lines(self) -> list[str]:
        """The tables as Markdown."""
        ours = [late for run in self.ours for late in run.late_ms]
        theirs = [late for run in self.theirs for late in run.late_ms]
        rows = [
            f"| {SAMPLES} samples at once: polls of the client | {_middle(c.polls for c in self.ours):.0f} (stub: "
            f"{_middle(c.polls for c in self.theirs):.0f}) | no hot polling |",
            f"| … memory of the API process, idle / peak | {self.idle_bytes / MB:.0f} / {self.peak_bytes / MB:.0f} MB "
            "| under 300 MB |",
            f"| … from a sample's end to its client, median | {_middle(ours):.1f} ms (stub: {_middle(theirs):.1f} ms; "
            f"90 %: {percentile(ours, 0.9):.1f} and {percentile(theirs, 0.9):.1f}) | under 10 ms |",
        ]
        for name, (ours, stubs) in self.single_ms.items():
            added = [our_ms - stub_ms for our_ms, stub_ms in zip(ours, stubs, strict=True)]
            rows.append(
                f"| one {name} after another, above the stub's {_middle(stubs):.1f} ms | {_middle(added):.1f} ms "
                f"(10 to 90 %: {percentile(added, 0.1):.1f} to {percentile(added, 0.9):.1f}) | under 5 ms |"
            )
        rows.append(
            f"| healthz while forward_backward bodies of {self.body_bytes / MB:.1f} MB come in, median / worst | "
            f"{_middle(self.ping_ms):.1f} / {max(self.ping_ms):.1f} ms (quiet: {_middle(self.quiet_ms):.1f} / "
            f"{max(self.quiet_ms):.1f}) | |"
        )
        return ["| what | measured | promised |", "|---|---|---|", *rows]


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="crowds at each server")
    parser.add_argument("--singles", type=int, default=200, help="single requests of each kind at each server")
    arguments = parser.parse_args()
    logging.getLogger("tinker").setLevel(logging.ERROR)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as data, timed_service(Path(data)) as service, stub() as stub_server:
        measurements = measure(service, stub_server, arguments.turns, arguments.singles)
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"
    load = f"load before / after: {before:.1f} / {os.getloadavg()[0]:.1f}"
    lines = ["# The service by itself", "", f"Measured by `benchmarks/service.py` on {machine}; {load}.", ""]
    RESULTS.mkdir(exist_ok=True)
    result = {"measured": time.strftime("%Y-%m-%d %H:%M"), "machine": machine, "load": load, **asdict(measurements)}
    (RESULTS / "service.json").write_text(json.dumps(result) + "\n")
    (RESULTS / "service.md").write_text("\n".join([*lines, *measurements.lines(), ""]))
    print("\n".join(measurements.lines()))


def measure(service: Server, stub_server: Server, turns: int, singles: int) -> Measurements:
    """Measure everything, interleaved."""
    clients = [tinker.ServiceClient(base_url=server.url, api_key=KEY) for server in (service, stub_server)]
    trainers = [client.create_lora_training_client("timed", rank=8, seed=1).result() for client in clients]
    samplers = [client.create_sampling_client(base_model="timed").result() for client in clients]
    single_ms = {
        "sample": _in_turns(singles, *(_sample_of(sampler) for sampler in samplers)),
        "optim_step": _in_turns(singles, *(_step_of(trainer) for trainer in trainers)),
    }
    idle = service.memory()
    ours, theirs = [], []
    with Watch(service) as watch:
        for turn in range(turns):
            sides = ((ours, samplers[0], service), (theirs, samplers[1], stub_server))
            for crowds, sampler, server in sides if turn % 2 == 0 else sides[::-1]:
                crowds.append(_concurrent_samples(sampler, server))
        quiet, pings, body = _pings(service, trainers[0], large=False)[0], *_pings(service, trainers[0], large=True)
    for client in clients:
        client.close("success").result()
    return Measurements(
        ours=ours,
        theirs=theirs,
        idle_bytes=idle,
        peak_bytes=watch.peak,
        single_ms=single_ms,
        ping_ms=pings,
        quiet_ms=quiet,
        body_bytes=body,
    )


def _concurrent_samples(sampler: Any, server: Server) -> ConcurrentSamples:
    """Submit all samples at once; they end over a period of ten seconds."""
    late: list[float] = []

    def arrived(future: Any) -> None:
        now, (seconds, microseconds) = time.time(), future.result().sequences[0].tokens
        late.append(round((now - seconds - microseconds / 1e6) * 1000, 2))

    ends, before, began = random.Random(1), _polls(server), time.perf_counter()
    futures = []
    for _ in range(SAMPLES):
        milliseconds = int(1000 * ends.uniform(*END_RANGE_S))
        future = sampler.sample(PROMPT, 1, tinker.SamplingParams(max_tokens=milliseconds)).future()
        future.add_done_callback(arrived)
        futures.append(future)
    wait(futures)
    return ConcurrentSamples(late_ms=late, polls=_polls(server) - before, seconds=time.perf_counter() - began)


def _polls(server: Server) -> int:
    """Number of retrieve_futures requests that the server has handled."""
    for path in ("/polls", "/metrics"):
        try:
            with urllib.request.urlopen(server.url + path, timeout=10) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError:
            continue
        if path == "/polls":
            return int(text)
        counted = re.findall(r'^tinsmith_http_\w+_count\{[^}]*retrieve_futures"[^}]*\} ([0-9.e+]+)', text, re.MULTILINE)
        return int(sum(float(value) for value in counted))
    raise RuntimeError(f"{server.url} counts no polls")


def _in_turns(times: int, ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Milliseconds of each call, alternating sides."""
    milliseconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(times + 5):
        for calls, call in zip(milliseconds, (ours, theirs), strict=True):
            start = time.perf_counter()
            call()
            if turn >= 5:
                calls.append(round((time.perf_counter() - start) * 1000, 2))
    return milliseconds


def _sample_of(sampler: Any) -> Callable[[], object]:
    return lambda: sampler.sample(PROMPT, 1, tinker.SamplingParams(max_tokens=1)).result()


def _step_of(trainer: Any) -> Callable[[], object]:
    return lambda: trainer.optim_step(tinker.AdamParams(learning_rate=0.0)).result()


def _pings(service: Server, trainer: Any, *, large: bool) -> tuple[list[float], int]:
    """Latencies of healthz over ten seconds, idle or with bodies as large as the SDK sends; and the bytes sent."""
    over, latencies = threading.Event(), []

    def ping() -> None:
        with httpx.Client(base_url=service.url) as http:
            http.get("/api/v1/healthz")
            while not over.wait(0.005):
                start = time.perf_counter()
                http.get("/api/v1/healthz").raise_for_status()
                latencies.append(round((time.perf_counter() - start) * 1000, 2))

    thread = threading.Thread(target=ping)
    tokens = [3 + index % 500 for index in range(4096)]
    inputs = {"target_tokens": np.array(tokens), "weights": np.zeros(4096, np.float32)}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    data = [datum] * 75
    thread.start()
    try:
        if large:
            for _ in range(2):
                trainer.forward(data, "cross_entropy").result()
        else:
            time.sleep(5)
    finally:
        over.set()
        thread.join()
    return latencies, 75 * 4096 * (4 + 8 + 4)


def _middle(values: Any) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    main()
