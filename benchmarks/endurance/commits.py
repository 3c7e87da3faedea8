"""Durable requests a second of the store, on disks of different speed: `python -m benchmarks.endurance.commits`.

Many tasks accept a small training request and store its result, as routes and workers do. strace delays each sync of
the process, in place of slower disks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.endurance.http_client import pass_body
from tinsmith.service.storage.payloads import decode_operation, queued_request
from tinsmith.service.storage.records import FutureResult
from tinsmith.service.storage.store import FinishedRequest, Store, open_store

RESULTS = Path(__file__).parents[1] / "results"
TASKS = 64
SECONDS = 5.0
DELAYS_MS = (0, 1, 8)
WANTED = {1: 1000, 8: 300}
"""Requests a second that the service is to reach on a disk with these syncs."""


def main() -> None:
    """Measure with each delay, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", action="store_true", help="measure in this process and print the rate")
    if parser.parse_args().child:
        with tempfile.TemporaryDirectory() as data:
            print(asyncio.run(_measure(Path(data))))
        return
    rates = {delay: _run(delay) for delay in DELAYS_MS}
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"
    table = [
        "| each sync takes longer by | requests accepted and answered a second | wanted |",
        "|---|---|---|",
        *(f"| {delay} ms | {rate:.0f} | {WANTED.get(delay, '')} |" for delay, rate in rates.items()),
    ]
    print("\n".join(table))
    RESULTS.mkdir(exist_ok=True)
    values = {"measured": time.strftime("%Y-%m-%d %H:%M"), "machine": machine, "tasks": TASKS, "rates": rates}
    (RESULTS / "commits.json").write_text(json.dumps(values, indent=1) + "\n")
    title = [
        "# Durable requests",
        "",
        f"Measured by `benchmarks/endurance/commits.py` on {machine}; {TASKS} at once.",
        "",
    ]
    (RESULTS / "commits.md").write_text("\n".join([*title, *table, ""]))


def _run(delay_ms: int) -> float:
    delay = f"inject=fsync,fdatasync:delay_exit={delay_ms * 1000}"
    traced = [
        "strace",
        "--follow-forks",
        "--seccomp-bpf",
        "--quiet=all",
        "-o",
        os.devnull,
        "-e",
        "trace=fsync,fdatasync",
    ]
    command = [*traced, "-e", delay] if delay_ms else []
    command += [sys.executable, "-m", "benchmarks.endurance.commits", "--child"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


async def _measure(data: Path) -> float:
    """Requests a second that are accepted, and then finished, each durably."""
    store = await open_store(data)
    end = time.perf_counter() + SECONDS
    counts = await asyncio.gather(*(_work(store, f"model-{number}", end) for number in range(TASKS)))
    await store.close()
    return sum(counts) / SECONDS


async def _work(store: Store, model: str, end: float) -> int:
    payload = pass_body(model, 1, 64)
    operation = decode_operation("forward_backward", model, payload)
    seq = 0
    while time.perf_counter() < end:
        seq += 1
        request = queued_request(f"{model}:{seq}", "tenant", model, seq, seq, operation)
        await store.accept(request, payload)
        await store.finish([FinishedRequest(request=request, result=FutureResult(body=b"{}"))])
    return seq


if __name__ == "__main__":
    main()
