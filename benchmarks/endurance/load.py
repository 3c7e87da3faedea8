"""Many clients at once: `python -m benchmarks.endurance.load [--seconds 600] [--clients 200]`.

Each client is a tenant of its own. First every client takes a step every other second, as clients do that sample in
between, each at times of its own: errors, the time of a submission, and memory. Then all clients send as fast as they
are answered: tokens of each tenant, from which Jain's index of fairness follows.

The server and the clients share the machine, and all clients are one process. So a submission is timed twice: by its
client, and by the server in `tinsmith_http_seconds`, which has buckets. By how much timers of each process are late
says what a request waits for either before anything is done for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.endurance.http_client import Client
from benchmarks.endurance.server import running_service
from benchmarks.servers import Server
from tinsmith.service.observability.event_loop import measure_delays

RESULTS = Path(__file__).parents[1] / "results"
TOKENS = 64
MiB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Measurements of one run."""

    measured: str
    machine: str
    load_average: list[float]
    """Of the machine, before and after: well above 2 means that other programs took part of its two cores."""
    engine: str
    clients: int
    period_s: float
    paced_s: float
    """Length of the first part."""
    saturated_s: float
    """Length of the second part."""
    requests: int
    errors: list[str]
    submit_ms: dict[str, float]
    """Time of a submission in the first part as its client sees it, by percentile."""
    server_submit_ms: float
    """99 % of the submissions of the first part took the server so long at most: the bound of a bucket."""
    server_late_ms: float
    """99 % of the server's timers were late by so much at most: the bound of a bucket."""
    clients_late_ms: dict[str, float]
    """By how much timers of the clients' process were late, by percentile."""
    step_ms: dict[str, float]
    """Time from the submission of a step to its results in the first part."""
    memory_mib: list[float]
    """Memory of the server in the first part, at the ends of ten equal spans."""
    memory_mib_per_hour: float
    """Growth of memory by a straight line through the second half of the first part."""
    saturated_requests_per_s: float
    fairness: float
    """Jain's index over the tokens of each tenant in the second part: 1 if all are equal, 1/n if one has all."""


@dataclass(slots=True)
class _Tally:
    submits: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="length of the first part; the second is a tenth, and 20 at least"
    )
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--period", type=float, default=2.0, help="seconds from step to step of a client")
    parser.add_argument("--model", help="folder of a base model for the real engine; without it the engine is fake")
    parser.add_argument("--name", default="load", help="name of the files in benchmarks/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as data:
        result = asyncio.run(_measure(Path(data), arguments))
    print("\n".join(table(result)))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{arguments.name}.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    lines = [
        "# Many clients at once",
        "",
        f"Measured by `benchmarks/endurance/load.py` on {result.machine}; "
        f"load average before / after: {result.load_average[0]:.1f} / {result.load_average[1]:.1f}.",
        "",
    ]
    (RESULTS / f"{arguments.name}.md").write_text("\n".join([*lines, *table(result), ""]))


def table(result: LoadResult) -> list[str]:
    """The result as Markdown."""
    submit, step = result.submit_ms, result.step_ms
    return [
        f"| {result.clients} clients, {result.engine} engine, {result.requests:,} requests | measured | wanted |",
        "|---|---|---|",
        f"| errors | {len(result.errors)} | 0 |",
        f"| a submission, median / 99 % / worst | {submit['50']:.1f} / {submit['99']:.1f} / {submit['100']:.1f} ms | "
        "99 % under 100 ms |",
        f"| … in the server, 99 % within | {result.server_submit_ms:g} ms | |",
        f"| timers late, 99 %: of the server / of the clients | {result.server_late_ms:g} / "
        f"{result.clients_late_ms['99']:.1f} ms | |",
        f"| a step to its results, median / 99 % | {step['50']:.0f} / {step['99']:.0f} ms | |",
        f"| memory of the server, first / last tenth of {result.paced_s:.0f} s | {result.memory_mib[0]:.0f} / "
        f"{result.memory_mib[-1]:.0f} MiB ({result.memory_mib_per_hour:+.0f} MiB an hour) | flat |",
        f"| requests a second, all clients without pauses | {result.saturated_requests_per_s:.0f} | |",
        f"| Jain's index of the tenants' tokens then | {result.fairness:.3f} | over 0.95 |",
    ]


async def _measure(data: Path, arguments: argparse.Namespace) -> LoadResult:
    load_before = os.getloadavg()[0]
    names = [f"tenant-{number}" for number in range(arguments.clients)]
    tally = _Tally()
    async with running_service(data, names, model=arguments.model, connections_per_address=8192) as (
        server,
        port,
        keys,
    ):
        clients = [Client(port=port, key=key, on_submit=tally.submits.append) for key in keys]
        await asyncio.gather(*(client.open() for client in clients))
        tally.submits.clear()
        metrics = await asyncio.to_thread(_buckets, server)
        watches = [
            asyncio.create_task(_watch_memory(server, tally)),
            asyncio.create_task(measure_delays(tally.late.append)),
        ]
        paced = arguments.seconds
        end = time.monotonic() + paced
        await asyncio.gather(
            *(_guard(tally, lambda c=client: _pace(c, end, arguments.period, tally)) for client in clients)
        )
        for watch in watches:
            watch.cancel()
        metrics = await asyncio.to_thread(_buckets, server) - metrics
        submits, steps, before = list(tally.submits), list(tally.steps), sum(client.requests for client in clients)
        saturated = max(paced / 10, 20.0)
        end = time.monotonic() + saturated
        await asyncio.gather(*(_guard(tally, lambda c=client: _saturate(c, end, tally)) for client in clients))
        requests = sum(client.requests for client in clients)
        for client in clients:
            client.close()
    return LoadResult(
        measured=time.strftime("%Y-%m-%d %H:%M"),
        machine=f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}",
        load_average=[load_before, os.getloadavg()[0]],
        engine="torch" if arguments.model else "fake",
        clients=arguments.clients,
        period_s=arguments.period,
        paced_s=paced,
        saturated_s=saturated,
        requests=requests,
        errors=tally.errors,
        submit_ms=_percentiles(submits),
        server_submit_ms=_bound_ms(metrics, "tinsmith_http_seconds", "/forward_backward", "/optim_step"),
        server_late_ms=_bound_ms(metrics, "tinsmith_event_loop_delay_seconds", ""),
        clients_late_ms=_percentiles(tally.late),
        step_ms=_percentiles(steps),
        memory_mib=_tenths(tally.memory),
        memory_mib_per_hour=_growth(tally.memory[len(tally.memory) // 2 :]),
        saturated_requests_per_s=(requests - before) / saturated,
        fairness=jain([tally.tokens.get(client.key, 0) for client in clients]),
    )


async def _guard(tally: _Tally, work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except Exception as error:  # noqa: BLE001 - every error of a client is a result
        tally.errors.append(f"{type(error).__name__}: {error}")


async def _pace(client: Client, end: float, period_s: float, tally: _Tally) -> None:
    """A step every period; now and then a sampling session, samples and a checkpoint."""
    rng = random.Random(client.key)
    at = time.monotonic() + rng.random() * period_s
    number = rng.randrange(50)  # clients are independent: not all of them sample at their tenth step at once
    while at < end:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        start = time.perf_counter()
        await client.step(TOKENS)
        tally.steps.append(time.perf_counter() - start)
        number += 1
        if number % 10 == 0:
            sampler = await client.snapshot()
            await asyncio.gather(*(client.sample(sampler, 16) for _ in range(4)))
        if number % 50 == 25:
            await client.delete(await client.save(f"state-{number}"))
        at = max(at + period_s * rng.uniform(0.8, 1.2), time.monotonic())


async def _saturate(client: Client, end: float, tally: _Tally) -> None:
    while time.monotonic() < end:
        await client.step(TOKENS)
        if time.monotonic() < end:
            tally.tokens[client.key] = tally.tokens.get(client.key, 0) + TOKENS


async def _watch_memory(server: Server, tally: _Tally) -> None:
    start = time.monotonic()
    while True:
        await asyncio.sleep(1.0)
        tally.memory.append((time.monotonic() - start, server.memory() / MiB))


def _buckets(server: Server) -> Counter[tuple[str, str, float]]:
    """Values of the server's histograms so far: (name, route, upper bound of a bucket) -> count within."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    counts: Counter[tuple[str, str, float]] = Counter()
    for name, labels, value in re.findall(r"^(\w+)_bucket\{(.*)\} (\S+)$", text, re.MULTILINE):
        values = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        counts[name, values.get("route", ""), float(values["le"])] += int(float(value))
    return counts


def _bound_ms(counts: Counter[tuple[str, str, float]], name: str, *routes: str) -> float:
    """The least bound of a bucket that 99 % of the values are within, in milliseconds."""
    bounds: Counter[float] = Counter()
    for (of_name, route, bound), count in counts.items():
        if of_name == name and route in routes:
            bounds[bound] += count
    return 1000 * min(bound for bound, count in bounds.items() if count >= 0.99 * max(bounds.values()))


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: (sum x)^2 / (n sum x^2)."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {str(p): round(float(np.percentile(seconds, p)) * 1000, 2) for p in (50, 90, 99, 100)}


def _tenths(memory: Sequence[tuple[float, float]]) -> list[float]:
    parts = np.array_split([value for _, value in memory], 10)
    return [round(float(part[-1]), 1) for part in parts if len(part)]


def _growth(memory: Sequence[tuple[float, float]]) -> float:
    if len(memory) < 3:
        return 0.0
    times, values = zip(*memory, strict=True)
    return round(float(np.polyfit(times, values, 1)[0]) * 3600, 1)


if __name__ == "__main__":
    main()
