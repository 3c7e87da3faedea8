"""The connection to an engine: a socket pair to a child process, against TCP to a process in a slot, also with TLS.

`python -m benchmarks.parts.http.link` starts a fake engine in each way and prints a table: the time of a call that does
nothing, and of a pass with 256 rows. It needs no GPU and takes half a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median, quantiles

import numpy as np

from tinsmith.engine.base import Datum, LoraSpec, Pass
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.processes.client import start_engine, start_local
from tinsmith.engine.processes.slots import LocalSlots
from tinsmith.engine.processes.tls import Identity

CONFIG = EngineConfig(source="fake", kind="fake")
CALLS, ROUNDS, PASSES, ROWS = 1000, 5, 10, 256


async def main() -> None:
    """Print a row for each way. The ways alternate, so that other work on the machine meets both."""
    plain, encrypted = LocalSlots(), LocalSlots(Identity.new())
    (slot,), (tls_slot,) = await plain.reserve(1, name="worker"), await encrypted.reserve(1, name="worker")
    engines = {
        "socket pair": await start_local(CONFIG),
        "TCP": await start_engine(slot, CONFIG, "fake", 1),
        "TCP with TLS": await start_engine(tls_slot, CONFIG, "fake", 1),
    }
    calls: dict[str, list[float]] = {name: [] for name in engines}
    passes: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        await engine.create("m", LoraSpec(rank=4, seed=1))
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            calls[name] += await timed(CALLS, lambda engine=engine: engine.cancel("nothing"))
            passes[name] += await timed(PASSES, lambda engine=engine: engine.run([request()]))
    print("| connection | call, median | p90 | pass of 256 rows |\n|---|---|---|---|")
    for name, engine in engines.items():
        p90 = quantiles(calls[name], n=10)[-1]
        print(f"| {name} | {median(calls[name]):.3f} ms | {p90:.3f} ms | {median(passes[name]):.1f} ms |")
        await engine.close()
    await plain.close()
    await encrypted.close()


async def timed(count: int, call: Callable[[], Awaitable[object]]) -> list[float]:
    """Milliseconds of each of a number of calls, one after another."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        times.append((time.perf_counter() - began) * 1000)
    return times


def request() -> Pass:
    """A forward pass of 256 short rows."""
    row = np.arange(3, 35, dtype=np.int32)
    weights = {"weights": np.ones(len(row), np.float32)}
    datum = Datum(tokens=row, targets=row.astype(np.int64), inputs=weights)
    return Pass(model_id="m", data=(datum,) * ROWS, loss_fn="cross_entropy", forward_only=True)


if __name__ == "__main__":
    asyncio.run(main())
