"""Months of use in minutes: `python -m benchmarks.endurance.soak [--models 3000]`.

Clients make sessions, each with a model, checkpoints, sampling sessions and about 33 requests, and end them; what has
ended is removed after seconds where a server would keep it for hours to weeks (`accelerated.py`). Memory, disk, rows
and latency are measured after each tenth of the work: at the end they should be as at the start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.endurance.accelerated import KEEP_S
from benchmarks.endurance.http_client import Client
from benchmarks.endurance.server import running_service
from benchmarks.servers import Server

RESULTS = Path(__file__).parents[1] / "results"
CLIENTS = 12
STEPS, NAMED, SNAPSHOTS = 12, 2, 2
"""Of each model: steps, named checkpoints and sampling sessions, with a sample from each."""
TOKENS = 48
PARTS = 10
QUIET_S = 3 * KEEP_S
"""Time after each part until its state is measured: what has ended is removed meanwhile."""
MiB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The server after a part of the work, when everything of it has ended."""

    requests: int
    models: int
    checkpoints: int
    memory_mib: float
    data_mib: float
    database_mib: float
    files: int
    rows: int
    submit_ms: float
    """Median time of a submission during the part."""
    submit_99_ms: float
    seconds: float
    """Length of the part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """Measurements of one run."""

    measured: str
    machine: str
    load_average: list[float]
    """Of the machine, before and after: well above 2 means that other programs took part of its two cores."""
    seconds: float
    errors: list[str]
    states: list[State]


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=3000)
    parser.add_argument("--data", type=Path, help="keep the data folder here")
    arguments = parser.parse_args()
    start, load_before = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        data = arguments.data or Path(scratch)
        data.mkdir(exist_ok=True)
        states, errors = asyncio.run(_soak(data, arguments.models))
    result = SoakResult(
        measured=time.strftime("%Y-%m-%d %H:%M"),
        machine=f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}",
        load_average=[load_before, os.getloadavg()[0]],
        seconds=round(time.monotonic() - start, 1),
        errors=errors,
        states=states,
    )
    print("\n".join(table(result)))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "soak.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    lines = [
        "# Months of use in minutes",
        "",
        f"Measured by `benchmarks/endurance/soak.py` on {result.machine}; "
        f"load average before / after: {result.load_average[0]:.1f} / {result.load_average[1]:.1f}.",
        "",
    ]
    (RESULTS / "soak.md").write_text("\n".join([*lines, *table(result), ""]))


def table(result: SoakResult) -> list[str]:
    """The result as Markdown."""
    rows = [
        f"| {state.requests:,} | {state.models:,} | {state.checkpoints:,} | {state.memory_mib:.0f} MiB | "
        f"{state.data_mib:.1f} MiB ({state.database_mib:.1f}) | {state.files:,} | {state.rows:,} | "
        f"{state.submit_ms:.1f} / {state.submit_99_ms:.1f} ms | {state.seconds:.0f} s |"
        for state in result.states
    ]
    return [
        f"{len(result.errors)} errors in {result.seconds / 60:.0f} minutes.",
        "",
        "| requests | models | checkpoints | memory | data folder (database) | files | rows | "
        "submission, median / 99 % | time of the part |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
    ]


async def _soak(data: Path, models: int) -> tuple[list[State], list[str]]:
    submits: list[float] = []
    errors: list[str] = []
    states: list[State] = []
    module = "benchmarks.endurance.accelerated"
    names = [f"tenant-{number}" for number in range(CLIENTS)]
    async with running_service(data, names, module=module, retention_s=KEEP_S, ended_retention_s=KEEP_S) as (
        server,
        port,
        keys,
    ):
        clients = [Client(port=port, key=key, on_submit=submits.append) for key in keys]
        for part in range(PARTS):
            submits.clear()
            start = time.monotonic()
            remaining = iter(range(models // PARTS))
            await asyncio.gather(*(_work(client, remaining, errors) for client in clients))
            seconds = time.monotonic() - start
            await asyncio.sleep(QUIET_S)
            done = models // PARTS * (part + 1)
            states.append(_state(server, data, sum(client.requests for client in clients), done, submits, seconds))
            print(states[-1], flush=True)
        for client in clients:
            client.close()
    return states, errors


async def _work(client: Client, remaining: object, errors: list[str]) -> None:
    """Make and end models until all are done."""
    for _ in remaining:  # type: ignore[attr-defined]
        try:
            await _use_model(client)
        except Exception as error:  # noqa: BLE001 - every error of a client is a result
            errors.append(f"{type(error).__name__}: {error}")
            client.close()


async def _use_model(client: Client) -> None:
    await client.open(rank=2)
    paths = []
    for step in range(STEPS):
        await client.step(TOKENS)
        if step % (STEPS // NAMED) == 1:
            paths.append(await client.save(f"state-{step}"))
        if step % (STEPS // SNAPSHOTS) == 3:
            await client.sample(await client.snapshot(), 8)
    for path in paths:
        await client.delete(path)
    await client.finish()


def _state(server: Server, data: Path, requests: int, models: int, submits: Sequence[float], seconds: float) -> State:
    files = [file for file in data.rglob("*") if file.is_file() and file.name != "serve.log"]
    sizes = {file: file.stat().st_size for file in files if file.exists()}
    database = sum(size for file, size in sizes.items() if file.name.startswith("tinsmith.db"))
    return State(
        requests=requests,
        models=models,
        checkpoints=models * (NAMED + SNAPSHOTS),
        memory_mib=server.memory() / MiB,
        data_mib=sum(sizes.values()) / MiB,
        database_mib=database / MiB,
        files=len(sizes),
        rows=_rows(data / "tinsmith.db"),
        submit_ms=float(np.percentile(submits, 50)) * 1000,
        submit_99_ms=float(np.percentile(submits, 99)) * 1000,
        seconds=seconds,
    )


def _rows(file: Path) -> int:
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as db:
        tables = [name for (name,) in db.execute("select name from sqlite_master where type = 'table'")]
        count = sum(db.execute(f'select count(*) from "{table}"').fetchone()[0] for table in tables)
    db.close()
    return count


if __name__ == "__main__":
    main()
