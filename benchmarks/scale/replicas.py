"""One sampler process against two, in turns: `python -m benchmarks.scale.replicas --turns 5`.

Every process has one thread. The pool gets more requests than it can run; the admission queue lets in as many as the
living replicas hold, as in the service. Reported are sampled tokens per second, and per second of the samplers' own
CPU time: where other programs take turns on the cores, only the second tells what the pool itself costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from tinsmith.engine.base import SampleRequest
from tinsmith.engine.cluster.launches import torch_in_slot
from tinsmith.engine.cluster.pool import SamplerPool
from tinsmith.engine.config import DEFAULT_MODEL, EngineConfig, converted_default
from tinsmith.engine.processes.slots import LocalSlots
from tinsmith.service.engines.admission import AdmissionQueue

PROMPT, TOKENS, GROUP = 64, 32, 4
CACHE_TOKENS = 4096
"""Of each replica: about 16 groups of four answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The same requests on one pool.

    Example: Turn(replicas=2, tokens=4096, seconds=20.1, cpu_seconds=38.9)
    """

    replicas: int
    tokens: int
    seconds: float
    cpu_seconds: float
    """Of all sampler processes."""


async def measure(model: str, turns: int, requests: int) -> list[Turn]:
    """Turns with one replica and with two, one after the other; two replicas get twice the requests."""
    config = EngineConfig(source=model, dtype="float32", device="cpu", threads=1, cache_tokens=CACHE_TOKENS)
    local = LocalSlots()
    slots = await local.reserve(3, name="sampler")
    launches = [torch_in_slot(slot, config) for slot in slots]
    pools = [await SamplerPool.start(launches[:1]), await SamplerPool.start(launches[1:])]
    try:
        for pool in pools:
            await _run(pool, 2, seed=0)
        results = []
        for turn in range(turns):
            order = pools if turn % 2 else pools[::-1]
            results += [await _run(pool, requests, seed=turn + 1) for pool in order]
        return results
    finally:
        for pool in pools:
            await pool.close()
        await local.close()


async def _run(pool: SamplerPool, requests: int, seed: int) -> Turn:
    replicas = pool.living
    queue = AdmissionQueue(CACHE_TOKENS)
    queue.resize(replicas)
    rng = np.random.default_rng(seed)

    async def sample(number: int) -> int:
        prompt = rng.integers(5, 40_000, PROMPT).astype(np.int32)
        request = SampleRequest(
            request_id=str(number), prompt=prompt, num_samples=GROUP, max_tokens=TOKENS, stop_tokens=(), seed=number
        )
        async with queue.admit("tenant", request):
            result = await pool.sample(request)
        return sum(len(sequence.tokens) for sequence in result.sequences)

    processes = [psutil.Process(each.pid) for each in pool.status()]
    before, started = cpu_seconds(processes), time.perf_counter()
    tokens = sum(await asyncio.gather(*map(sample, range(requests * replicas))))
    seconds = time.perf_counter() - started
    return Turn(replicas=replicas, tokens=tokens, seconds=seconds, cpu_seconds=cpu_seconds(processes) - before)


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """CPU time that processes have used so far."""
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def ratios(turns: list[Turn]) -> tuple[list[float], list[float]]:
    """Of each pair of turns: tokens/s of two replicas by those of one, and the same per CPU second of a replica."""
    by_time, by_cpu = [], []
    for pair in zip(turns[::2], turns[1::2], strict=True):
        single, double = sorted(pair, key=lambda turn: turn.replicas)
        by_time.append((double.tokens / double.seconds) / (single.tokens / single.seconds))
        by_cpu.append(2 * (double.tokens / double.cpu_seconds) / (single.tokens / single.cpu_seconds))
    return by_time, by_cpu


def main() -> None:
    """Measure, print, and write the turns as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = converted_default()
    parser.add_argument("--model", default=str(default) if default.is_dir() else DEFAULT_MODEL)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=12, help="groups of four answers for each replica")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/replicas.json"))
    args = parser.parse_args()
    turns = asyncio.run(measure(args.model, args.turns, args.requests))
    by_time, by_cpu = ratios(turns)
    for name, values in (("tokens/s", by_time), ("tokens per CPU second", by_cpu)):
        print(f"{name}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
    args.out.write_text(json.dumps([asdict(turn) for turn in turns], indent=1) + "\n")


if __name__ == "__main__":
    main()
